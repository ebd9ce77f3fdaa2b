"""Seconds of collectives among the devices that hold the same weights.

With ZeRO-2 and 3, gathers and reductions of weight parts add to the time of every unit. The
collective of one part overlaps the compute of another, so the longer of a unit's compute and
collectives counts; gathers and reductions share the links. A part outside the layers that has no
room beside a layer waits for the layer before it, and the layer after it waits for the part: both
collectives are exposed, except reductions of the head's gradients, which are formed in F and
overlap the F of the next unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.sharding.weight_parts import ElementsByCopies, ShardedParts, sharded_parts
from sppo.cost.workload import ACCUMULATION_BYTES
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import DEFERRING_WEIGHTS
from sppo.units import MIB

REDUCE_BUCKET_BYTES = 32 * MIB
"""Bytes of fp32 gradients of one bucket, which are reduced together (ZeRO-0 and 1)."""
REDUCE_BUCKETS = 2
"""Buckets of gradients whose reductions are in flight at once."""
_FORMED_PASSES = 1
"""Passes over whole gradients in addition to their products: writing zeros."""
_ADDED_PASSES = 3
"""Passes over a shard to add gradients to its sums: two reads and a write."""


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


def with_collectives(candidate: Candidate, passes: Mapping[str, Table]) -> dict[str, Table]:
    """Return the seconds of F, B and W of units including the collectives of their parts.

    Args:
        candidate: Candidate with `zero` of at least 2.
        passes: Seconds without collectives, [stages, units], by name of the pass.

    Returns:
        Seconds, [stages, units], under the names "forward", "backward" and "weight".
    """
    names = "forward", "backward", "weight"
    rows = [
        _stage_with_collectives(candidate, *(passes[name][stage] for name in names), stage=stage)
        for stage in range(len(candidate.stages))
    ]
    return dict(zip(names, map(np.stack, zip(*rows, strict=True)), strict=True))


def unit_collective_seconds(candidate: Candidate) -> tuple[tuple[float, float], ...]:
    """Return the seconds of a unit's collectives in its F and in its B, for each stage.

    Args:
        candidate: Candidate with `zero` of 2 and no deferred weight halves, as with MSP.
    """
    found = []
    for stage in range(len(candidate.stages)):
        parts = sharded_parts(candidate, stage=stage, trained=True)
        layers_s = parts.num_layers * _reduction_s(candidate, parts.layer)
        backward_s = layers_s + _reduction_s(candidate, parts.before_layers)
        found.append((_reduction_s(candidate, parts.after_layers), backward_s))
    return tuple(found)


def layer_gather_seconds(candidate: Candidate) -> Table:
    """Return the seconds of gathering the weights of a layer, [stages].

    0 if weights are whole on each device.
    """
    parts = [sharded_parts(candidate, stage=stage) for stage in range(len(candidate.stages))]
    return np.array([_gather_s(candidate, own.layer) for own in parts])


def last_reduction_seconds(candidate: Candidate) -> Table:
    """Return the seconds of the last reduction of each stage if its rank waits for it, [stages].

    The rank waits after its last backward, and after every stage whose gradients then leave the
    device. Other reductions overlap the compute of the rank's next stage and count 0.
    """
    seconds = np.zeros(len(candidate.stages))
    leaves = candidate.state.streams_gradients
    for stage in range(len(seconds)) if leaves else candidate.last_backward_stages.tolist():
        parts = sharded_parts(candidate, stage=stage, trained=True)
        last = parts.layer
        if stage == 0:
            # Without room beside a layer, the reduction is already exposed in every B.
            last = parts.before_layers if parts.fits_beside_layer(parts.before_layers) else {}
        seconds[stage] = _reduction_s(candidate, last)
    return seconds


def _stage_with_collectives(
    candidate: Candidate, forward: Table, backward: Table, weight: Table, *, stage: int
) -> tuple[Table, Table, Table]:
    """Return the seconds of F, B and W of one stage's units including collectives, [units] each."""
    weights, gradients = (
        sharded_parts(candidate, stage=stage, trained=trained) for trained in (False, True)
    )
    gather_s = _gather_s(candidate, weights.layer)
    reduction_s = _reduction_s(candidate, gradients.layer)
    # A B gathers the weights of a layer twice if they are used to recompute an input, too.
    layers, trained = int(candidate.backward_layers[stage]), gradients.num_layers
    visits = 2 * layers - -(-layers // candidate.input_every)
    forward = _forward(candidate, weights, gradients, forward, gather_s=gather_s)
    backward = backward + _local_s(candidate, gradients.before_layers)
    weight = weight + trained * _local_s(candidate, gradients.layer)
    embedding_s = _reduction_s(candidate, gradients.before_layers)
    deferring = candidate.schedule in DEFERRING_WEIGHTS
    hidden_s, exposed_s = visits * gather_s, 0.0
    if not deferring:
        hidden_s += trained * reduction_s
    if gradients.fits_beside_layer(gradients.before_layers):
        hidden_s += embedding_s
    else:
        # The reduction of the layer before the embedding is no longer hidden.
        waits_s = 0.0 if deferring else reduction_s
        hidden_s, exposed_s = hidden_s - waits_s, embedding_s + waits_s
    if deferring:
        backward = np.maximum(backward, hidden_s)
        weight = np.maximum(weight, trained * reduction_s)
    else:
        backward = np.maximum(backward, hidden_s - weight)
    return forward, backward + exposed_s, weight


def _forward(
    candidate: Candidate,
    weights: ShardedParts,
    gradients: ShardedParts,
    compute_s: Table,
    *,
    gather_s: float,
) -> Table:
    """Return the seconds of F including collectives, [units]."""
    head_s = _reduction_s(candidate, gradients.after_layers)
    waits = 0
    hidden_s, exposed_s = np.full_like(compute_s, head_s), np.zeros_like(compute_s)
    if not gradients.fits_beside_layer(gradients.after_layers):
        # Each F hides the head's reduction of the previous unit; after the last F of a sequence, a
        # B follows, which does not.
        ends = np.cumsum([len(lengths) for lengths in candidate.sequence_lengths])
        hidden_s[[0, *ends[:-1].tolist()]] -= head_s
        exposed_s[ends - 1] += head_s
    for outer in (weights.before_layers, weights.after_layers):
        outer_s = _gather_s(candidate, outer)
        if weights.fits_beside_layer(outer):
            hidden_s += outer_s
        else:
            exposed_s += outer_s
            waits += 1
    # Gathers of layers after parts without room are no longer hidden.
    waits = min(waits, weights.num_layers)
    hidden_s += (weights.num_layers - waits) * gather_s
    exposed_s += waits * gather_s
    compute_s = compute_s + _local_s(candidate, gradients.after_layers)
    seconds: Table = np.maximum(compute_s, hidden_s) + exposed_s
    return seconds


def _gather_s(candidate: Candidate, part: ElementsByCopies) -> float:
    """Return the seconds of gathering a part's weights; 0 with ZeRO-2, which keeps them whole."""
    if candidate.zero < 3:
        return 0.0
    return _collective_s(candidate, part, element_bytes=candidate.workload.element_bytes)


def _reduction_s(candidate: Candidate, part: ElementsByCopies) -> float:
    """Return the seconds of reducing a part's fp32 gradients to the devices that keep them."""
    return _collective_s(candidate, part, element_bytes=ACCUMULATION_BYTES)


def _collective_s(candidate: Candidate, part: ElementsByCopies, *, element_bytes: int) -> float:
    return sum(
        float(shard_seconds(candidate, np.array(held * element_bytes), copies=copies))
        for copies, held in part.items()
    )


def _local_s(candidate: Candidate, part: ElementsByCopies) -> float:
    """Return the seconds of memory traffic on a part's whole gradients and on a shard's sums."""
    elements = sum(
        held * (_FORMED_PASSES + _ADDED_PASSES / (copies * candidate.data_parallel_degree))
        for copies, held in part.items()
    )
    return elements * ACCUMULATION_BYTES / candidate.workload.hardware.device.memory_bytes_per_s
