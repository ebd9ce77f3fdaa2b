"""Parts of a stage's parameters that devices shard and have whole only while they use them.

With ZeRO-3 weights are gathered before a part is used, from ZeRO-2 on its gradients are reduced
after (:mod:`sppo.engine.gathered_weights`, :mod:`sppo.engine.sharded_gradients`). A part is one
layer, what is in front of the layers, or what is behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sppo.cost.candidate import Candidate
from sppo.cost.layer import Workload
from sppo.cost.parameters import layer_parameters, outer_parameters
from sppo.cost.sharding.megatron_weights import layer_elements

ElementsByCopies = Mapping[int, float]
"""Elements on one device by the devices of a sequence-parallel group that hold the same ones."""


@dataclass(frozen=True, slots=True)
class ShardedParts:
    """Elements of what devices shard, part by part; not those that one device has alone.

    Attributes:
        num_layers: Of the stage, or of the rank.
        layer: One layer.
        before: Embedding and learned positions; empty but on the first stage.
        behind: Last norm and projection to the vocabulary; empty but on the last stage.
    """

    num_layers: int
    layer: ElementsByCopies
    before: ElementsByCopies
    behind: ElementsByCopies

    @property
    def room_elements(self) -> float:
        """Elements that are whole at once: two layers, or the largest part outside of them."""
        return max(2 * _total(self.layer), _total(self.before), _total(self.behind))

    @property
    def most_elements(self) -> float:
        """Elements of the largest part."""
        return max(map(_total, (self.layer, self.before, self.behind)))

    def fits_beside_layer(self, part: ElementsByCopies) -> bool:
        """Return whether there is room for a part outside of the layers while a layer is whole."""
        return _total(part) + _total(self.layer) <= self.room_elements


def sharded_parts(candidate: Candidate, *, stage: int) -> ShardedParts:
    """Return the parts of a stage with what its devices shard of each; before ZeRO-2 nothing."""
    if candidate.zero < 2:
        return ShardedParts(len(candidate.stages[stage]), {}, {}, {})
    workload = candidate.workload
    before, behind = outer_parameters(workload.model)
    return ShardedParts(
        len(candidate.stages[stage]),
        _sharded(layer_by_copies(workload), candidate),
        _sharded(outer_by_copies(workload, before), candidate) if stage == 0 else {},
        _sharded(outer_by_copies(workload, behind), candidate)
        if candidate.is_last_stage(stage)
        else {},
    )


def rank_parts(candidate: Candidate, *, rank: int) -> ShardedParts:
    """Return the parts of all stages of a pipeline rank, which use the same room in turn."""
    stages = candidate.stages_of_rank(rank)
    first = last = sharded_parts(candidate, stage=stages[0])
    if len(stages) > 1:
        last = sharded_parts(candidate, stage=stages[-1])
    num_layers = sum(len(candidate.stages[stage]) for stage in stages)
    return ShardedParts(num_layers, first.layer, first.before, last.behind)


def layer_by_copies(workload: Workload) -> ElementsByCopies:
    """Return the elements of one layer: Megatron shards them, Ulysses repeats them."""
    degree = workload.sequence_parallel_degree
    if workload.sequence_parallel == "megatron" and degree > 1:
        return layer_elements(workload.model, degree=degree)
    return {degree: float(layer_parameters(workload.model))}


def outer_by_copies(workload: Workload, elements: float) -> ElementsByCopies:
    """Return so many elements outside of the layers, as a device of a group holds them."""
    degree = workload.sequence_parallel_degree
    if workload.vocabulary_sharded and degree > 1:
        return {1: elements / degree}
    return {degree: elements}


def _sharded(elements: ElementsByCopies, candidate: Candidate) -> ElementsByCopies:
    replicas = candidate.data_parallel_degree
    return {copies: held for copies, held in elements.items() if copies * replicas > 1}


def _total(elements: ElementsByCopies) -> float:
    return sum(elements.values())
