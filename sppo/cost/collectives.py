"""Seconds of collectives among the devices that hold the same weights."""

from __future__ import annotations

from sppo.cost.candidate import Candidate
from sppo.schedule.costs import Table


def shard_seconds(candidate: Candidate, sent_bytes: Table, *, copies: int) -> Table:
    """One all-gather, or one reduce-scatter, among all devices with the same weights.

    Each passes on what it does not keep, (n-1)/n of the whole, along rings. Rings of a group that
    spans nodes leave a node through as many ports as it has members there. Devices are numbered
    along the sequence-parallel group, then the pipeline, then the replicas
    (:mod:`sppo.parallel.mesh`).

    Args:
        candidate: whose.
        sent_bytes: the whole, in the dtype that travels, any shape.
        copies: devices of a sequence-parallel group that hold the same.
    """
    hardware, replicas = candidate.workload.hardware, candidate.data_parallel_degree
    members, devices = copies * replicas, hardware.node.num_devices
    replica = candidate.pipeline_parallel_degree * candidate.workload.sequence_parallel_degree
    in_node = min(copies, devices) * min(replicas, max(1, devices // replica))
    network = hardware.network
    rate = network.intra_node_bytes_per_s
    if members > in_node:
        rate = min(rate, in_node * network.inter_node_bytes_per_s)
    seconds: Table = sent_bytes * (members - 1) / members / rate
    return seconds
