"""Seconds that gathering weights and reducing gradients by parts adds to a step (ZeRO-2 and 3).

One part is on its way while another computes, so of compute and collectives of a unit the longer
one counts; gathers and reductions share the links. A part outside of the layers that is larger than
there is room for beside a layer waits for the layer before it, and the layer behind it waits for
it: both are exposed, but for the head's gradients, which are formed in F and travel while the next
unit's F computes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.cost.pass_parts import LayerSeconds
from sppo.cost.sharding.collectives import shard_seconds
from sppo.cost.sharding.parts import ElementsByCopies, ShardedParts, sharded_parts
from sppo.schedule.costs import Table
from sppo.schedule.generators import DEFERRING_WEIGHTS

_FORMED_PASSES = 1
"""Times that whole gradients are written beyond their products: with zeros."""
_COPIED_PASSES = 2
"""Times that a layer's are read and written to be one message."""
_ADDED_PASSES = 3
"""Times that a shard's sums, and what is added to them, are read and written."""


def with_collectives(candidate: Candidate, units: LayerSeconds) -> LayerSeconds:
    """Return seconds of units, [stages, units], with what their parts' collectives add.

    Args:
        candidate: with `zero` of at least 2.
        units: compute alone.
    """
    rows = [
        _stage_with_collectives(candidate, _row(units, stage), stage=stage)
        for stage in range(len(candidate.stages))
    ]
    return replace(
        units,
        forward=np.stack([row.forward for row in rows]),
        backward=np.stack([row.backward for row in rows]),
        weight=np.stack([row.weight for row in rows]),
    )


def unit_collective_seconds(candidate: Candidate) -> tuple[tuple[float, float], ...]:
    """Return how long the collectives of one unit take on each stage: those in its F, in its B.

    Args:
        candidate: with `zero` of 2 and weight halves that are not deferred, as MSP's.
    """
    found = []
    for stage in range(len(candidate.stages)):
        parts = sharded_parts(candidate, stage=stage)
        layers_s = parts.num_layers * _reduction_s(candidate, parts.layer)
        backward_s = layers_s + _reduction_s(candidate, parts.before)
        found.append((_reduction_s(candidate, parts.behind), backward_s))
    return tuple(found)


def layer_gather_seconds(candidate: Candidate) -> Table:
    """Return how long the weights of all layers of each stage take to be gathered, [stages].

    0 where they are whole on each device.
    """
    parts = [sharded_parts(candidate, stage=stage) for stage in range(len(candidate.stages))]
    return np.array([own.num_layers * _gather_s(candidate, own.layer) for own in parts])


def last_reduction_seconds(candidate: Candidate) -> Table:
    """Return how long the last reduction of each stage takes, if its REDUCE waits, [stages].

    It does behind the last backward of its rank, and where the stage's gradients then leave the
    device. Others travel while the rank's next stage computes.
    """
    seconds = np.zeros(len(candidate.stages))
    leaves = candidate.state.streams_gradients
    for stage in range(len(seconds) if leaves else candidate.pipeline_parallel_degree):
        parts = sharded_parts(candidate, stage=stage)
        last = parts.layer
        if stage == 0:
            # One that has no room beside a layer is exposed in every B already.
            last = parts.before if parts.fits_beside_layer(parts.before) else {}
        seconds[stage] = _reduction_s(candidate, last)
    return seconds


def _stage_with_collectives(
    candidate: Candidate, units: LayerSeconds, *, stage: int
) -> LayerSeconds:
    """Seconds of one stage's units, [units]."""
    parts = sharded_parts(candidate, stage=stage)
    gather_s = _gather_s(candidate, parts.layer)
    reduction_s = _reduction_s(candidate, parts.layer)
    layers, visits = parts.num_layers, _backward_visits(candidate, parts.num_layers)
    forward = _forward(candidate, parts, units.forward, gather_s=gather_s)
    backward = units.backward + _local_s(candidate, parts.before, passes=_FORMED_PASSES)
    weight = units.weight + layers * _local_s(
        candidate, parts.layer, passes=_FORMED_PASSES + _COPIED_PASSES
    )
    embedding_s = _reduction_s(candidate, parts.before)
    deferring = candidate.schedule in DEFERRING_WEIGHTS
    hidden_s, exposed_s = visits * gather_s, 0.0
    if not deferring:
        hidden_s += layers * reduction_s
    if parts.fits_beside_layer(parts.before):
        hidden_s += embedding_s
    else:
        waits_s = 0.0 if deferring else reduction_s  # the layer before it, no longer hidden
        hidden_s, exposed_s = hidden_s - waits_s, embedding_s + waits_s
    if deferring:
        backward = np.maximum(backward, hidden_s)
        weight = np.maximum(weight, layers * reduction_s)
    else:
        backward = np.maximum(backward, hidden_s - weight)
    return replace(units, forward=forward, backward=backward + exposed_s, weight=weight)


def _forward(
    candidate: Candidate, parts: ShardedParts, compute_s: Table, *, gather_s: float
) -> Table:
    """Seconds of F, [units]."""
    head_s = _reduction_s(candidate, parts.behind)
    waits = 0
    hidden_s, exposed_s = np.full_like(compute_s, head_s), np.zeros_like(compute_s)
    if not parts.fits_beside_layer(parts.behind):
        # Each unit hides that of the unit before it; what follows the last of a sequence is a B.
        ends = np.cumsum([len(lengths) for lengths in candidate.sequence_lengths])
        hidden_s[[0, *ends[:-1].tolist()]] -= head_s
        exposed_s[ends - 1] += head_s
    for outer in (parts.before, parts.behind):
        outer_s = _gather_s(candidate, outer)
        if parts.fits_beside_layer(outer):
            hidden_s += outer_s
        else:
            exposed_s += outer_s
            waits += 1
    waits = min(waits, parts.num_layers)  # layers behind those, no longer hidden
    hidden_s += (parts.num_layers - waits) * gather_s
    exposed_s += waits * gather_s
    compute_s = compute_s + _local_s(candidate, parts.behind, passes=_FORMED_PASSES)
    seconds: Table = np.maximum(compute_s, hidden_s) + exposed_s
    return seconds


def _backward_visits(candidate: Candidate, layers: int) -> int:
    """Layers whose weights a B takes: those that recompute an input are taken for that, too."""
    return 2 * layers - -(-layers // candidate.input_every)


def _gather_s(candidate: Candidate, part: ElementsByCopies) -> float:
    """Seconds of gathering a part's weights; 0 where they are whole on each device (ZeRO-2)."""
    if candidate.zero < 3:
        return 0.0
    return _collective_s(candidate, part, element_bytes=candidate.workload.element_bytes)


def _reduction_s(candidate: Candidate, part: ElementsByCopies) -> float:
    """Seconds of reducing a part's fp32 gradients to the devices that keep them."""
    return _collective_s(candidate, part, element_bytes=ACCUMULATION_BYTES)


def _collective_s(candidate: Candidate, part: ElementsByCopies, *, element_bytes: int) -> float:
    return sum(
        float(shard_seconds(candidate, np.array(held * element_bytes), copies=copies))
        for copies, held in part.items()
    )


def _local_s(candidate: Candidate, part: ElementsByCopies, *, passes: int) -> float:
    """Seconds of memory traffic of a part's whole gradients, and of adding them to a shard."""
    elements = sum(
        held * (passes + _ADDED_PASSES / (copies * candidate.data_parallel_degree))
        for copies, held in part.items()
    )
    return elements * ACCUMULATION_BYTES / candidate.workload.hardware.device.memory_bytes_per_s


def _row(units: LayerSeconds, stage: int) -> LayerSeconds:
    return replace(
        units,
        forward=units.forward[stage],
        backward=units.backward[stage],
        weight=units.weight[stage],
    )
