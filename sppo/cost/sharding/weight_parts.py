"""Parameters of a device by weight part, and the number of devices that hold the same ones.

Functions count all parameters, or those that train if `trained` is set.

A weight part is one layer, the parameters before the layers, or the parameters after them. Only
Megatron shards a layer inside a sequence-parallel group. With ZeRO-3, the weights of a part are
gathered before use (:mod:`sppo.engine.providers.gathered_weights`); with ZeRO-2 and 3, its
gradients are reduced after use (:mod:`sppo.engine.providers.sharded_gradients`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.layer_kinds import LayerKind, Shapes, count_kinds, elements
from sppo.cost.parameters import COLUMNS, KEYS, ROWS, outer_parts
from sppo.cost.trainable import is_whole_factor, trains_head
from sppo.cost.workload import Workload
from sppo.schedule.actions import RESIDENT_STAGES
from sppo.schedule.costs import Table

ElementsByCopies = Mapping[int, float]
"""Elements on one device, by the number of devices of its group that hold the same elements."""


@dataclass(frozen=True, slots=True)
class ShardedParts:
    """Elements that devices shard, by part; elements that only one device holds are left out.

    Attributes:
        num_layers: Number of layers of the stage, or of the rank, that have elements.
        layer: Elements of the largest layer.
        before_layers: Elements of the embedding and learned positions; empty except on the first
            stage.
        after_layers: Elements of the last norm and the vocabulary projection; empty except on the
            last stage.
    """

    num_layers: int
    layer: ElementsByCopies
    before_layers: ElementsByCopies
    after_layers: ElementsByCopies

    @property
    def room_elements(self) -> float:
        """Elements for which there is room whole: two layers, or the largest part outside them."""
        return max(2 * _total(self.layer), _total(self.before_layers), _total(self.after_layers))

    @property
    def most_elements(self) -> float:
        """Number of elements of the largest part."""
        return max(map(_total, (self.layer, self.before_layers, self.after_layers)))

    def fits_beside_layer(self, part: ElementsByCopies) -> bool:
        """Return whether a part outside the layers has room while a layer is whole."""
        return _total(part) + _total(self.layer) <= self.room_elements


def sharded_parts(candidate: Candidate, *, stage: int, trained: bool = False) -> ShardedParts:
    """Return the sharded parts of a stage; all parts are empty with ZeRO-0 and 1."""
    return _sharded_parts(candidate, first=stage, last=stage, trained=trained)


def rank_parts(candidate: Candidate, *, rank: int, trained: bool = False) -> ShardedParts:
    """Return the sharded parts of a pipeline rank, whose stages share the room of whole parts."""
    stages = candidate.stages_of_rank(rank)
    return _sharded_parts(candidate, first=stages[0], last=stages[-1], trained=trained)


def _sharded_parts(candidate: Candidate, *, first: int, last: int, trained: bool) -> ShardedParts:
    """Return the sharded parts of the stages of a rank from `first` to `last`."""
    workload, replicas = candidate.workload, candidate.data_parallel_degree
    step = candidate.pipeline_parallel_degree
    kinds = sum(candidate.kinds_of_layers[first : last + 1 : step], Counter[LayerKind]())
    layers = [
        (count, held)
        for kind, count in kinds.items()
        if (held := layer_by_copies(workload, kind.trained_shapes if trained else kind.shapes))
    ]
    num_layers = sum(count for count, _ in layers)
    if candidate.zero < 2:
        return ShardedParts(num_layers, {}, {}, {})
    before, after = (
        outer_by_copies(workload, own) for own in _outer_elements(workload, trained=trained)
    )

    def sharded(part: ElementsByCopies, *, is_here: bool = True) -> ElementsByCopies:
        return {n: held for n, held in part.items() if is_here and n * replicas > 1}

    return ShardedParts(
        num_layers,
        sharded(max((held for _, held in layers), key=_total, default={})),
        sharded(before, is_here=first == 0),
        sharded(after, is_here=candidate.is_last_stage(last)),
    )


@lru_cache(maxsize=256)
def layer_by_copies(workload: Workload, shapes: Shapes) -> ElementsByCopies:
    """Return the elements of parameters of a layer on the device that holds the most; cached."""
    model, degree = workload.model, workload.sequence_parallel_degree
    if workload.sequence_parallel == "ulysses":
        return {degree: float(elements(shapes))} if shapes else {}
    found: dict[int, float] = {}
    for name, shape in shapes:
        part = name.split(".")[0]
        copies = 1 if part in (*ROWS, *COLUMNS) and not is_whole_factor(name) else degree
        if part in KEYS and not is_whole_factor(name):
            copies = max(1, degree // model.kv_heads)
        is_whole = part in COLUMNS and name.endswith(".bias")
        held = float(prod(shape)) if is_whole else prod(shape) * copies / degree
        found[copies] = found.get(copies, 0.0) + held
    return found


def outer_by_copies(workload: Workload, elements: float) -> ElementsByCopies:
    """Return `elements` outside the layers as a device of a sequence-parallel group holds them."""
    degree = workload.sequence_parallel_degree
    if workload.vocabulary_sharded and degree > 1:
        return {1: elements / degree}
    return {degree: elements}


def same_weights_degree(workload: Workload) -> int:
    """Return the devices of a sequence-parallel group that hold equal weights, to shard state."""
    return workload.sequence_parallel_degree if workload.sequence_parallel == "ulysses" else 1


def _outer_elements(workload: Workload, *, trained: bool) -> tuple[int, int]:
    """Return the elements before and after the layers; a tied embedding counts in both."""
    before, after = (
        sum(
            prod(shape)
            for name, shape in shapes.items()
            if not trained or workload.trainable.trains(name)
        )
        for shapes in outer_parts(workload.model)
    )
    return before, after


def device_parameters(candidate: Candidate, *, trained: bool = False) -> Table:
    """Return the parameters a device computes with, [stages]; only Megatron shards them."""
    held = parameters_by_copies(candidate, trained=trained).values()
    counts: Table = sum(held, np.zeros(candidate.num_stages))
    return counts


def sharded_parameters(candidate: Candidate, *, trained: bool = False) -> Table:
    """Return the parameters of a device if those of equal weights are sharded (ZeRO), [stages]."""
    counts: Table = np.zeros(candidate.num_stages)
    for copies, held in parameters_by_copies(candidate, trained=trained).items():
        counts = counts + held / (copies * candidate.data_parallel_degree)
    return counts


def kept_parameters(candidate: Candidate, *, shards_from: int, trained: bool = False) -> Table:
    """Return the parameters that a device keeps between uses, [stages].

    Args:
        candidate: Candidate that the devices belong to.
        shards_from: ZeRO stage from which on a device keeps its shard alone.
        trained: Whether only parameters that train count.
    """
    of_stages = sharded_parameters if candidate.zero >= shards_from else device_parameters
    return of_stages(candidate, trained=trained)


def streamed_weights(candidate: Candidate) -> Table:
    """Return the weights of a device that live in another tier between uses, [stages]."""
    tiers = candidate.state
    weights: Table = kept_parameters(candidate, shards_from=3) * tiers.streams_weights
    if tiers.streams_weights and not tiers.streams_trained_weights:
        weights = weights - kept_parameters(candidate, shards_from=3, trained=True)
    return weights


def parameters_by_copies(candidate: Candidate, *, trained: bool = False) -> Mapping[int, Table]:
    """Return the parameters a device computes with, by the number of devices that hold the same.

    The number counts devices of the sequence-parallel group; each value is [stages]. The last stage
    has a copy of a tied embedding if it is on another rank than the first.
    """
    is_pipeline = candidate.pipeline_parallel_degree > 1
    return _parameters_of_stages(
        candidate.workload, candidate.stages, is_pipeline=is_pipeline, trained=trained
    )


@lru_cache(maxsize=128)
def _parameters_of_stages(
    workload: Workload, stages: tuple[range, ...], *, is_pipeline: bool, trained: bool
) -> Mapping[int, Table]:
    """Return the cached result of :func:`parameters_by_copies`; must not be modified."""
    model, found = workload.model, defaultdict[int, Table](lambda: np.zeros(len(stages)))
    for stage, kinds in enumerate(count_kinds(model, workload.trainable, stages)):
        for kind, count in kinds.items():
            shapes = kind.trained_shapes if trained else kind.shapes
            for copies, held in layer_by_copies(workload, shapes).items():
                found[copies][stage] += count * held
    before, after = _outer_elements(workload, trained=trained)
    if (
        model.tie_embeddings
        and not is_pipeline
        and (not trained or trains_head(model, workload.trainable))
    ):
        after -= model.vocab_size * model.hidden_size
    for stage, outer in ((0, before), (-1, after)):
        for copies, held in outer_by_copies(workload, outer).items():
            found[copies][stage] += held
    return dict(found)


def most_held_of_ranks(candidate: Candidate, of_stages: Table, *, consecutive: bool) -> Table:
    """Return the largest sum of values over stages that are on a rank's device at once, [ranks].

    `RESIDENT_STAGES` stages are on the device at once: see
    :mod:`sppo.schedule.transfers.copies`.

    Args:
        candidate: Candidate that the stages belong to.
        of_stages: Value of each stage, [stages].
        consecutive: Whether the stages on the device are consecutive ones of the rank; otherwise
            they may be any.
    """
    by_rank = candidate.by_rank(of_stages)
    count = min(RESIDENT_STAGES, len(by_rank))
    if not consecutive:
        largest: Table = np.sort(by_rank, axis=0)[-count:].sum(axis=0)
        return largest
    windows = [by_rank[first : len(by_rank) - count + first + 1] for first in range(count)]
    most: Table = np.sum(windows, axis=0).max(axis=0)
    return most


def _total(elements: ElementsByCopies) -> float:
    return sum(elements.values())
