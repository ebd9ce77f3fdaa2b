"""Seconds of collectives among the devices that hold the same weights."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.schedule.costs import Table
from sppo.units import MIB

REDUCE_BUCKET_BYTES = 32 * MIB
"""fp32 gradients that are reduced together, of all ranks (ZeRO-0 and 1)."""
REDUCE_BUCKETS = 2
"""Buckets of gradients whose reduction is under way at once."""


def shard_seconds(candidate: Candidate, sent_bytes: Table, *, copies: int) -> Table:
    """One all-gather, or one reduce-scatter, among all devices with the same weights.

    Each passes on what it does not keep, (n-1)/n of the whole, along rings. Every ring of a group
    that spans nodes passes through all of them, so there are as many as the node with the fewest
    members has ports. The slowest stage counts.

    Args:
        candidate: whose.
        sent_bytes: the whole, in the dtype that travels, any shape.
        copies: devices of a sequence-parallel group that hold the same.
    """
    hardware, replicas = candidate.workload.hardware, candidate.data_parallel_degree
    members, network = copies * replicas, hardware.network
    ports = _ports(
        replicas,
        candidate.pipeline_parallel_degree,
        candidate.workload.sequence_parallel_degree,
        copies=copies,
        per_node=hardware.node.num_devices,
    )
    rate = network.intra_node_bytes_per_s
    if ports is not None:
        rate = min(rate, ports * network.inter_node_bytes_per_s)
    seconds: Table = sent_bytes * (members - 1) / members / rate
    return seconds


@lru_cache(maxsize=256)
def _ports(replicas: int, stages: int, group: int, *, copies: int, per_node: int) -> int | None:
    """Fewest members in a node of any stage's devices with the same weights; None in one node.

    Devices are numbered along the sequence-parallel group, then the pipeline, then the replicas
    (:mod:`sppo.parallel.mesh`).
    """
    first = np.arange(replicas)[:, None] * stages * group + np.arange(copies)
    fewest: int | None = None
    for stage in range(stages):
        _, members = np.unique((first + stage * group) // per_node, return_counts=True)
        if len(members) > 1:
            fewest = min(int(members.min()), fewest or replicas * copies)
    return fewest
