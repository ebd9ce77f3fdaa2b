"""Weight parts of a stage that devices shard, and that a device holds whole only while in use.

A weight part is one layer, the parameters before the layers, or the parameters after them. With
ZeRO-3, the weights of a part are gathered before use
(:mod:`sppo.engine.providers.gathered_weights`); with ZeRO-2 and 3, its gradients are reduced after
use (:mod:`sppo.engine.providers.sharded_gradients`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.parameters import layer_parameters, outer_parameters
from sppo.cost.sharding.megatron_weights import layer_elements

ElementsByCopies = Mapping[int, float]
"""Elements on one device, by the number of devices of its group that hold the same elements."""


@dataclass(frozen=True, slots=True)
class ShardedParts:
    """Elements that devices shard, by part; elements that only one device holds are left out.

    Attributes:
        num_layers: Number of layers of the stage, or of the rank.
        layer: Elements of one layer.
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


def sharded_parts(candidate: Candidate, *, stage: int) -> ShardedParts:
    """Return the sharded parts of a stage; all parts are empty with ZeRO-0 and 1."""
    if candidate.zero < 2:
        return ShardedParts(len(candidate.stages[stage]), {}, {}, {})
    workload = candidate.workload
    before, after = outer_parameters(workload.model)
    return ShardedParts(
        len(candidate.stages[stage]),
        _sharded(layer_by_copies(workload), candidate),
        _sharded(outer_by_copies(workload, before), candidate) if stage == 0 else {},
        _sharded(outer_by_copies(workload, after), candidate)
        if candidate.is_last_stage(stage)
        else {},
    )


def rank_parts(candidate: Candidate, *, rank: int) -> ShardedParts:
    """Return the sharded parts of a pipeline rank, whose stages share the room of whole parts."""
    stages = candidate.stages_of_rank(rank)
    first = last = sharded_parts(candidate, stage=stages[0])
    if len(stages) > 1:
        last = sharded_parts(candidate, stage=stages[-1])
    num_layers = sum(len(candidate.stages[stage]) for stage in stages)
    return ShardedParts(num_layers, first.layer, first.before_layers, last.after_layers)


def layer_by_copies(workload: Workload) -> ElementsByCopies:
    """Return the elements of one layer on a device; only Megatron shards them in the group."""
    degree = workload.sequence_parallel_degree
    if workload.sequence_parallel == "megatron" and degree > 1:
        return layer_elements(workload.model, degree=degree)
    return {degree: float(layer_parameters(workload.model))}


def outer_by_copies(workload: Workload, elements: float) -> ElementsByCopies:
    """Return `elements` outside the layers as a device of a sequence-parallel group holds them."""
    degree = workload.sequence_parallel_degree
    if workload.vocabulary_sharded and degree > 1:
        return {1: elements / degree}
    return {degree: elements}


def _sharded(elements: ElementsByCopies, candidate: Candidate) -> ElementsByCopies:
    replicas = candidate.data_parallel_degree
    return {copies: held for copies, held in elements.items() if copies * replicas > 1}


def _total(elements: ElementsByCopies) -> float:
    return sum(elements.values())
