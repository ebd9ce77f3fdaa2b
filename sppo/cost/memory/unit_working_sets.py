"""Working sets of the forwards and backwards of a candidate's units and MSP shards.

A working set is freed when its unit ends, so it is added to what is held at that moment
(:func:`sppo.cost.memory.walk.bytes_at_peak`). Backward joins saved tensors that a placement divides
by rows; joined tensors are part of the working set, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np

from sppo.activations.block_layout import BlockLayout
from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.tensor_classes import (
    ATTENTION,
    CLASSES,
    LINEAR,
    X_IN,
    class_bytes_per_token,
)
from sppo.cost.candidate import Candidate
from sppo.cost.layer_kinds import LayerKind, kinds_of_model, layer_kinds
from sppo.cost.live_sets.shard_live_sets import ShardSizes
from sppo.cost.live_sets.working_set import loss_working_set, same_prefixes, working_sets
from sppo.cost.stages.stage_cost import kinds_of_stages
from sppo.cost.workload import Workload
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import DEFERRING_WEIGHTS

_INPUTS = ("q", "k", "linear_inputs", "linear_gate")
"""Saved tensors that attention reads."""


def computing_bytes(
    candidate: Candidate, placement: ActivationPlacement, *, beside_messages: bool = False
) -> Table:
    """Return the working sets of all forwards, and of all backwards, in bytes, [2, stages, N].

    On a GPU they include the tensors that backward joins from parts.

    Args:
        candidate: Candidate to price.
        placement: Placement of the candidate's activations.
        beside_messages: Whether messages and joined tensors are counted one by one: then neither
            joined tensors nor the gradient of a stage's output are included. If no more layers
            count than share an input, it is not: the first layer of a backward reads it, and a
            later layer reads another in its place.
    """
    firsts, kinds = kinds_of_stages(candidate, placement)
    computing = []
    for stage in firsts:
        layers = int(candidate.backward_layers[stage])
        counted = min(layers, candidate.input_every) if beside_messages else layers
        forward, backward = _of_stage(candidate, placement, stage=stage, layers=counted)
        if candidate.workload.hardware.device.kind == "cuda" and not beside_messages:
            backward = _with_joined(backward, candidate, placement, stage=stage)
        computing.append((forward, backward))
    return np.array(computing)[kinds].swapaxes(0, 1)


def _of_stage(
    candidate: Candidate, placement: ActivationPlacement, *, stage: int, layers: int
) -> tuple[Table, Table]:
    """Return the working sets of a stage's forwards and backwards, [N] each, if `layers` count."""
    tokens = np.array(candidate.lengths)
    recomputed = placement.recomputed[stage] > 0
    retained = placement.retained[stage] == tokens[:, None]
    degree = candidate.workload.sequence_parallel_degree
    prefixes = same_prefixes(
        candidate.workload,
        tokens=-(-tokens // degree) * degree,
        prefixes=np.array(candidate.prefixes),
    )
    rows = np.column_stack([tokens, prefixes, recomputed, retained])
    # Most units of a long sequence are alike.
    kinds, kind_of_unit = np.unique(rows, axis=0, return_inverse=True)
    forward, backward = np.zeros((2, len(kinds)))
    for kind, (length, prefix, *classes) in enumerate(kinds.tolist()):
        forward[kind], backward[kind] = running_bytes(
            candidate,
            tokens=length,
            prefix=prefix,
            recomputed=_true(classes[: len(CLASSES)]),
            retained=_true(classes[len(CLASSES) :]),
            stage=stage,
            layers=layers,
        )
        if candidate.is_last_stage(stage):
            forward[kind] = max(forward[kind], loss_bytes(candidate.workload, tokens=length))
    return forward[kind_of_unit], backward[kind_of_unit]


def running_bytes(
    candidate: Candidate,
    *,
    tokens: int,
    prefix: int,
    recomputed: frozenset[int],
    retained: frozenset[int],
    stage: int,
    layers: int,
    shard: ShardSizes | None = None,
) -> tuple[int, int]:
    """Return the bytes of the working sets of the forward and the backward of a unit or a shard.

    Args:
        candidate: Candidate to price.
        tokens: Tokens of all devices of a sequence-parallel group together.
        prefix: Tokens of the sequence before the unit or the shard.
        recomputed: Tensor classes that backward recomputes.
        retained: Tensor classes of which every row is retained.
        stage: Index of the stage.
        layers: Layers of the stage that count, of those with a backward. If there are none, nothing
            is saved, as in a forward whose tensors are all recomputed.
        shard: Sizes of the MSP shard; None for a whole unit.
    """
    every = candidate.input_every
    if not layers:
        recomputed, retained = frozenset((ATTENTION, LINEAR)), frozenset()
    above = {} if shard else _saved_above(candidate, stage=stage, retained=retained)
    here, row_bytes = tokens // candidate.workload.sequence_parallel_degree, 0
    if layers <= every and X_IN in retained:  # the place of the gradient from the layer above
        row_bytes = candidate.workload.hidden_row_bytes
    forwards, backwards = [], []
    for kind in _kinds(candidate, stage=stage):
        (_, forward), (_, backward) = working_sets(
            candidate.workload,
            tokens=-(-tokens // candidate.workload.sequence_parallel_degree),
            prefix=prefix,
            recomputed=recomputed,
            # Copies on a stack are in memory that is allocated all the time.
            retained=frozenset() if candidate.keeps_a_stack else retained,
            defers=candidate.schedule in DEFERRING_WEIGHTS,
            input_every=every,
            # Layers beyond those that share an input all have the same working set.
            layers=min(layers, every + 1),
            shard=shard,
            kind=kind,
            recomputes_windows=candidate.recomputes_windows[stage],
        )
        saved = int(here * above.get(kind, 0.0))
        forwards.append(forward - saved)
        backwards.append(backward - max(0, saved - here * row_bytes))
    return max(forwards), max(backwards)


def _saved_above(
    candidate: Candidate, *, stage: int, retained: frozenset[int]
) -> Mapping[LayerKind | None, float]:
    """Return the bytes per token that layers above the last layer of each kind retain.

    They count as held during the whole forward and backward of a unit, but are not yet saved in the
    one, and free in the other, while that layer runs. With deferred weight halves they are not
    free, and layers that share an input run at once: then nothing is returned.
    """
    deferred = candidate.schedule in DEFERRING_WEIGHTS
    if deferred or candidate.keeps_a_stack or candidate.input_every > 1:
        return {}
    return _bytes_above(candidate.workload, candidate.stages[stage], retained)


@lru_cache(maxsize=1 << 12)
def _bytes_above(
    workload: Workload, layers: range, retained: frozenset[int]
) -> Mapping[LayerKind | None, float]:
    found: dict[LayerKind | None, float] = {}
    kinds, saved = layer_kinds(workload.model, workload.trainable), 0.0
    for layer in reversed(layers):
        kind = kinds[layer]
        found.setdefault(kind, saved)
        of_classes = class_bytes_per_token(
            workload.model, kind.type, element_bytes=workload.element_bytes
        )
        saved += sum(of_classes[index] for index in retained) * kind.has_backward
    return found


def _kinds(candidate: Candidate, *, stage: int) -> Collection[LayerKind | None]:
    """Return the kinds of layers of a stage that save tensors, or of all if none does.

    None stands for the kind of all layers.
    """
    workload, kinds = candidate.workload, candidate.kinds_of_layers[stage]
    every = kinds_of_model(workload.model, workload.trainable)
    alike = len({(own.type.routed, own.type.linear, own.window) for own in every}) == 1
    if workload.trainable.is_everything and alike:
        return (None,)
    return [kind for kind in kinds if kind.has_backward] or [*kinds]


def loss_bytes(workload: Workload, *, tokens: int) -> int:
    """Return the bytes of the working set of the loss of a subsequence of `tokens`."""
    here = -(-tokens // workload.sequence_parallel_degree)
    return loss_working_set(workload, tokens=here)[1]


def _true(flags: Sequence[int]) -> frozenset[int]:
    """Return the tensor classes whose flag is 1."""
    return frozenset(index for index, flag in enumerate(flags) if flag)


def _with_joined(
    backward: Table, candidate: Candidate, placement: ActivationPlacement, *, stage: int
) -> Table:
    """Return the bytes of backwards with joined tensors, whose retained parts are freed, [N]."""
    layout, workload = block_layout(candidate, stage=stage), candidate.workload
    joined = joined_bytes(placement, layout, stage=stage)
    is_cut = (placement.retained[stage] > 0) & (placement.offloaded[stage] > 0)
    parts = [
        (placement.retained[stage] * is_cut)
        @ class_bytes_per_token(workload.model, own, element_bytes=workload.element_bytes)
        / layout.shard_count
        for own in layout.row_bytes
    ]
    freed = np.min(parts, axis=0) if parts else 0
    found: Table = np.maximum(joined, backward + np.maximum(0, joined - freed))
    return found


def block_layout(candidate: Candidate, *, stage: int) -> BlockLayout:
    """Return the layout of the packed blocks of one stage."""
    workload = candidate.workload
    return BlockLayout(
        workload.model,
        layers=candidate.layers_with_backward(stage),
        element_bytes=workload.element_bytes,
        input_every=candidate.input_every,
        shard_count=workload.sequence_parallel_degree,
    )


def joined_bytes(placement: ActivationPlacement, shape: BlockLayout, *, stage: int) -> Counts:
    """Return the bytes of tensors of each subsequence that backward joins from parts, [N].

    All layers that share a saved input count together: backward takes them at once, and the joined
    tensors of a layer stay until its own backward ends. They count as if all had the type of layer
    whose tensors are largest. The input itself counts once. A partly recomputed tensor counts in
    the working set as if it were recomputed whole, except queries and keys, which are joined
    earlier and count here.

    Args:
        placement: Placement by the activation policy.
        shape: Layout of the blocks of the stage.
        stage: Index of the stage.
    """
    retains, offloads, recomputes = (table[stage] > 0 for table in placement)
    is_cut = (retains & offloads) | ((retains | offloads) & recomputes)
    tokens = placement.tokens
    rows = tokens[:, None] * (is_cut & ~recomputes)
    other, first = np.max(
        [np.zeros((2, len(rows)), np.int64)]
        + [shape.layer_bytes(own, rows) for own in shape.row_bytes],
        axis=0,
    )
    shared = shape.taken_at_once
    layers = np.where(recomputes[:, ATTENTION], 1, shared)
    sooner = (is_cut & recomputes)[:, LINEAR] * queries_bytes(shape, tokens)
    found: Counts = first + (layers - 1) * other + layers * sooner
    return found


def queries_bytes(shape: BlockLayout, tokens: Counts) -> Counts:
    """Return the bytes of the saved inputs of attention of one layer, [N].

    They are queries, and keys if any, or those of linear attention, whichever are larger.
    """
    most: Counts = np.zeros_like(tokens)
    for sizes in shape.row_bytes.values():
        own = (shape.sharded_bytes(sizes.get(name, 0), tokens) for name in _INPUTS)
        most = np.maximum(most, sum(own, start=np.zeros_like(tokens)))
    return most
