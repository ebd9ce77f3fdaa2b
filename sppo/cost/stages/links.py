"""Copies and messages of a stage: rates of copy engines, bytes of messages, links of ranks."""

from __future__ import annotations

from itertools import permutations
from math import inf

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.hardware.description import Tier
from sppo.hardware.rates import Floats
from sppo.schedule.costs import CopyEngines, Link, Links, Table

_MOST_RANGES = {"cuda": 24}
"""Most ranges of ranks in which one rank may share units (MSP), by kind of device; no limit if
absent.

Each range takes a stream of each of torch's two pools of 32, which leaves 8 streams of each for
other uses (:mod:`sppo.parallel.mesh_shape`)."""


def copy_bytes_per_s(candidate: Candidate) -> tuple[float, float]:
    """Return the rates (D2H, H2D) of a device's offloaded tensors; 0 without a tier for them."""
    return tier_bytes_per_s(candidate, candidate.tier)


def tier_bytes_per_s(candidate: Candidate, tier: Tier) -> tuple[float, float]:
    """Return the rates (D2H, H2D) of a device's copies to and from a tier; 0 for the device itself.

    Copies between a GPU and a disk pass through the host, so the lower of both rates counts.
    """
    hardware = candidate.workload.hardware
    node, host = hardware.node, hardware.node.host_copy_bytes_per_s
    if tier == "host":
        return host
    if tier == "device":
        return 0.0, 0.0
    write, read = (
        rate / node.num_devices
        for rate in (node.disk_write_bytes_per_s, node.disk_read_bytes_per_s)
    )
    if hardware.device.kind == "cpu":
        return write, read
    return min(write, host[0]), min(read, host[1])


def copy_engines(candidate: Candidate, tier: Tier) -> CopyEngines:
    """Return the copy engines to and from a tier; infinitely fast if the machine lacks the tier."""
    out, back = tier_bytes_per_s(candidate, tier)
    return CopyEngines(out, back) if out > 0 and back > 0 else CopyEngines()


def message_bytes(candidate: Candidate) -> Floats:
    """Return the bytes of one activation or gradient message between stages, [units]."""
    workload, lengths = candidate.workload, np.array(candidate.lengths * candidate.sequences)
    sizes: Floats = lengths * workload.hidden_row_bytes / workload.sequence_parallel_degree
    return sizes


def message_seconds(candidate: Candidate) -> tuple[Table, Table]:
    """Return the compute seconds of the messages of forwards and of backwards, [stages, units].

    A stage receives from one neighbour and sends to the other; the first and the last stage have
    only one neighbour. Stages without backward have no gradients to send or receive.
    """
    each_s = (
        message_bytes(candidate) * candidate.workload.hardware.network.message_compute_s_per_byte
    )
    down, first = candidate.neighbours, candidate.forward_only_stages
    up = down.copy()
    if first:
        up[:first] = 0
        up[first] = min(down[first], first < len(up) - 1)
    return down[:, None] * each_s, up[:, None] * each_s


def pipeline_links(candidate: Candidate) -> Links:
    """Return the links between pipeline ranks, with each sequence-parallel group contiguous."""
    hardware, width = candidate.workload.hardware, candidate.workload.sequence_parallel_degree
    network = hardware.network
    inside = Link(network.intra_node_latency_s, network.intra_node_bytes_per_s)
    outside = Link(network.inter_node_latency_s, network.inter_node_bytes_per_s)
    ranks = range(candidate.pipeline_parallel_degree)
    node_of = [rank * width // hardware.node.num_devices for rank in ranks]
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        members.setdefault(node, []).append(rank)
    between = {pair: inside for ranks in members.values() for pair in permutations(ranks, 2)}
    return Links(outside, between, _MOST_RANGES.get(hardware.device.kind, inf))
