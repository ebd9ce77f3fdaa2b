"""Seconds of collectives among the devices that hold the same weights."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.schedule.costs import Table
from sppo.units import MIB

REDUCE_BUCKET_BYTES = 32 * MIB
"""Bytes of fp32 gradients of one bucket, which are reduced together (ZeRO-0 and 1)."""
REDUCE_BUCKETS = 2
"""Buckets of gradients whose reductions are in flight at once."""


def shard_seconds(candidate: Candidate, sent_bytes: Table, *, copies: int) -> Table:
    """Return the seconds of one all-gather or reduce-scatter among devices with equal weights.

    Each of n devices sends (n-1)/n of the whole along rings. A ring of a group that spans nodes
    passes through all of them, so there are as many rings as the node with the fewest members has
    ports. The slowest stage counts.

    Args:
        candidate: Candidate that the devices belong to.
        sent_bytes: Bytes of the whole tensor in the dtype that is sent, of any shape.
        copies: Devices of a sequence-parallel group that hold equal weights.
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
    """Return the fewest members per node of a group with equal weights, over all stages.

    None if every group is inside one node. Devices are numbered along the sequence-parallel group,
    then the pipeline, then the replicas (:mod:`sppo.parallel.mesh`).
    """
    first = np.arange(replicas)[:, None] * stages * group + np.arange(copies)
    fewest: int | None = None
    for stage in range(stages):
        _, members = np.unique((first + stage * group) // per_node, return_counts=True)
        if len(members) > 1:
            fewest = min(int(members.min()), fewest or replicas * copies)
    return fewest
