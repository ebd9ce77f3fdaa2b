"""The shard of a run's weights, gradients and optimizer state that this rank holds.

A rank computes with the parameters of its stages: whole ones or, with Megatron sequence
parallelism, its blocks of them (:mod:`sppo.parallel.megatron`). Among ranks that hold the same
parameters, each updates the rows that :class:`sppo.parallel.data_parallel.GradientReducer` assigns
to it, so masters and moments exist once. From ZeRO-2 on a rank keeps only those rows of the
gradients too, and reduces them after each use; with ZeRO-3 only those of the weights as well, and
gathers parameters while it computes with them. Where the vocabulary projection is the embedding,
the first and the last stage both hold it: their gradients are added up, both update it, and
checkpoints take it from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.checkpoint.state_block import StateBlock
from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, parameter_shapes
from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES
from sppo.engine.gathered_weights import GatheredWeights
from sppo.engine.gradients import GradientProvider, ResidentGradients
from sppo.engine.pipeline import Pipeline
from sppo.engine.sharded_gradients import ShardedGradients
from sppo.engine.weights import ResidentWeights, WeightProvider
from sppo.kernels.gradient_norm import sum_of_squares
from sppo.optim.adamw import STEP_KEY, global_norm
from sppo.optim.fused_adamw import MOMENTS
from sppo.parallel.data_parallel import GradientReducer, add_up
from sppo.parallel.gradient_reduce_scatter import GradientReduceScatter
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.megatron import WeightSharding
from sppo.parallel.mesh import Holders, Mesh
from sppo.parallel.parameter_all_gather import ParameterAllGather

T = TypeVar("T")

_TIED = "embed.weight"


class ShardedState:
    """Weights, gradients and optimizer state of one rank: its shard of each parameter.

    Args:
        model: the shape.
        mesh: of all ranks; its shape says whether sequence-parallel groups shard weights.
        pipeline: this rank's place in it.
        device: that computes; weights and gradients may live behind it.
        zero: 1 shards the optimizer's state among the ranks that hold the same weights, 2 the
            gradients too, 3 the weights too, 0 nothing.
        bucket_bytes: of a bucket of gradients that are reduced together, in fp32.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        mesh: Mesh,
        pipeline: Pipeline,
        device: torch.device,
        zero: int,
        bucket_bytes: int = REDUCE_BUCKET_BYTES,
    ) -> None:
        self._device = device
        self.sharding = weight_sharding(model, mesh)
        self._by_stage = {
            stage: self.sharding.shapes(layers)
            for stage, layers in pipeline.layers(model.num_layers).items()
        }
        self.shapes: dict[str, Shape] = {
            name: shape for shapes in self._by_stage.values() for name, shape in shapes.items()
        }
        """Shapes of what this rank holds of the parameters of its stages, by global name."""
        self._whole_shapes = parameter_shapes(model)
        self._mesh = mesh
        self._groups = {
            holders: GradientReducer(
                group,
                index=members.index(mesh.rank),
                shapes=self._held_by(holders, self.shapes),
                shards_state=zero > 0,
                bucket_bytes=bucket_bytes,
                device=device,
            )
            for holders, group, members in _same_weights(mesh)
        }
        self._shards_gradients, self._shards_weights = zero >= 2, zero >= 3
        ends = mesh.shape.pipeline_parallel > 1 and model.tie_embeddings
        self._is_tied = ends and _TIED in self.shapes
        self._speaks_for_tied = not self._is_tied or mesh.at.pipeline == 0

    def _held_by(self, holders: Holders, names: Mapping[str, T]) -> dict[str, T]:
        """Return those of ``names`` of which ``holders`` have the same."""
        return {name: v for name, v in names.items() if self.sharding.holders(name) == holders}

    def _group(self, name: str) -> GradientReducer:
        """The ranks that hold the same of a parameter as this one."""
        return self._groups[self.sharding.holders(name)]

    def kept(self, name: str, weight: Tensor) -> Tensor:
        """Return the part of a parameter that stays here while nobody computes with it."""
        if not self._keeps_rows(name):
            return weight
        return weight[self._group(name).own_rows(name)].clone()

    def provider(self, weights: Mapping[str, Tensor]) -> WeightProvider:
        """Return what gives the engine its weights; every rank calls it at the same point.

        Args:
            weights: what is :meth:`kept` of all parameters of this rank's stages, by global name,
                or the copies of it that come to the device stage by stage.
        """
        if not self._shards_weights:
            return ResidentWeights(weights)
        gathers: dict[str, ParameterAllGather] = {}
        for holders, group in self._groups.items():
            communicator = self._mesh.gather_group(holders)
            if communicator is not None:
                gather = ParameterAllGather(communicator, index=group.index)
                gathers |= self._held_by(holders, dict.fromkeys(self.shapes, gather))
        if not gathers:
            return ResidentWeights(weights)
        return GatheredWeights(weights, shapes=self.shapes, gathers=gathers)

    @property
    def names_of_stages(self) -> dict[int, list[str]]:
        """Global names of the parameters of each of this rank's stages."""
        return {stage: [*shapes] for stage, shapes in self._by_stage.items()}

    @property
    def kept_shapes(self) -> dict[str, Shape]:
        """Shapes of what is :meth:`kept` of the parameters, by global name."""
        return {
            name: self._own_shape(name) if self._keeps_rows(name) else shape
            for name, shape in self.shapes.items()
        }

    def _keeps_rows(self, name: str) -> bool:
        """Return whether only some rows of a parameter stay here while nobody computes with it."""
        return self._shards_weights and self._group(name).shards_state

    def _own_shape(self, name: str) -> Shape:
        rows = self._group(name).own_rows(name)
        return (rows.stop - rows.start, *self.shapes[name][1:])

    @property
    def gradient_shapes(self) -> dict[str, Shape]:
        """Shapes of the gradients that this rank keeps during a step, by global name."""
        if not self._shards_gradients:
            return dict(self.shapes)
        return {name: self._own_shape(name) for name in self.shapes}

    @property
    def own_shapes(self) -> dict[str, Shape]:
        """Shapes of what is this rank's :meth:`own` of the parameters, by global name."""
        shapes = {name: self._own_shape(name) for name in self.shapes}
        return {name: shape for name, shape in shapes.items() if shape[0]}

    def gradient_provider(self, gradients: Mapping[str, Tensor]) -> GradientProvider:
        """Return what gives the engine its gradients.

        Reductions after each use have the communicators that otherwise reduce gradients once per
        step: no rank does both, and nothing else uses them during a step.

        Args:
            gradients: of :attr:`gradient_shapes`, by global name, or copies that leave the device
                stage by stage.
        """
        scatters: dict[str, GradientReduceScatter] = {}
        for holders, communicator, members in _same_weights(self._mesh):
            if communicator is not None and self._shards_gradients:
                scatter = GradientReduceScatter(communicator, index=members.index(self._mesh.rank))
                scatters |= self._held_by(holders, dict.fromkeys(self.shapes, scatter))
        if scatters:
            return ShardedGradients(gradients, shapes=self.shapes, scatters=scatters)
        return ResidentGradients(
            gradients,
            reduce=lambda stage: self._begin_reduction(stage, gradients),
            settle=self._end_reductions,
        )

    def own(self, tensors: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Tensor]:
        """The rows that this rank updates. Parameters of which it has none are left out.

        Args:
            tensors: what this rank holds of parameters, or their gradients, by global name: all
                rows, or only those that it updates.
            copy: where the rows are not all, copy them, so that the others can be forgotten.
        """
        found = {}
        for name, tensor in tensors.items():
            rows = _rows(tensor, self._group(name).own_rows(name))
            if not rows.shape[0]:
                continue
            if rows.shape[0] == tensor.shape[0]:
                found[name] = tensor
            else:
                found[name] = rows.clone() if copy else rows
        return found

    def _begin_reduction(self, stage: int, gradients: Mapping[str, Tensor]) -> None:
        """Begin to add up the gradients of a stage, complete and whole on this rank.

        A tied embedding that this rank's first stage has too is complete, and added up, with that
        one.
        """
        names = self._by_stage[stage]
        first = min(self._by_stage)
        if stage != first:
            names = {n: shape for n, shape in names.items() if n not in self._by_stage[first]}
        for holders, group in self._groups.items():
            group.reduce(gradients, self._held_by(holders, names))

    def _end_reductions(self) -> None:
        """Return when what was begun has been added up."""
        for group in self._groups.values():
            group.wait()

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        """Return when gradients are those of all ranks, in the rows that this rank updates."""
        self._end_reductions()
        if self._is_tied:
            rows = self._group(_TIED).own_rows(_TIED)
            ends = self._mesh.groups.ends
            assert ends is not None, "ranks that share a parameter are connected"
            own = _rows(gradients[_TIED], rows)
            what = "adding up the embedding's gradients"
            add_up([own], ends, what=what, device=self._device)

    def gather(self, weights: Mapping[str, Tensor]) -> None:
        """Fetch what other ranks have updated, of what is :meth:`kept`."""
        if self._shards_weights:
            return
        for holders, group in self._groups.items():
            group.gather(self._held_by(holders, weights))

    def norm(
        self,
        gradients: Mapping[str, Tensor],
        peers: HostCollectives,
        *,
        after_each: Callable[[], None] | None = None,
    ) -> Tensor:
        """Euclidean norm of the gradients of all parameters of all ranks.

        Args:
            gradients: that this rank keeps, by global name.
            peers: all ranks.
            after_each: called when one has been read; None reads all at once.
        """
        if not self._mesh.is_distributed:
            return global_norm(gradients, after_each=after_each)
        counted = [
            _rows(gradient, self._group(name).counted_rows(name))
            for name, gradient in gradients.items()
            if name != _TIED or self._speaks_for_tied
        ]
        squares = float(sum_of_squares(counted, after_each=after_each)) if counted else 0.0
        (total,) = peers.total([squares])
        return torch.tensor(total**0.5, dtype=next(iter(gradients.values())).dtype)

    def blocks(self, state: Mapping[str, Tensor]) -> dict[str, StateBlock]:
        """An optimizer's state over :meth:`own` tensors as parts of the whole model's."""
        return {key: self._block(key, tensor) for key, tensor in state.items()}

    def saved(self, state: Mapping[str, Tensor]) -> dict[str, StateBlock]:
        """Return those :meth:`blocks` of ``state`` that this rank saves."""
        blocks = self.blocks(state)
        if self._speaks_for_tied:
            return blocks
        return {key: block for key, block in blocks.items() if _parameter(key) != _TIED}

    def _block(self, key: str, tensor: Tensor) -> StateBlock:
        name = _parameter(key)
        if name is None:
            return StateBlock(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        shape = self.shapes[name]
        assert prod(tensor.shape[1:]) == prod(shape[1:]), f"{key}: {tensor.shape} of {shape}"
        first, *rest = self.sharding.offsets(name)
        offsets = (first + self._group(name).own_rows(name).start, *rest)
        return StateBlock(tensor, offsets, self._whole_shapes[name])


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    """Return ``rows`` of a parameter, of which ``tensor`` has all rows or just these."""
    return tensor if tensor.shape[0] == rows.stop - rows.start else tensor[rows]


def weight_sharding(model: ModelConfig, mesh: Mesh) -> WeightSharding:
    """Return how a rank's part of the model's parameters is cut."""
    if mesh.shape.key_copies is None:
        return WeightSharding(model)
    return WeightSharding(model, mesh.at.sequence, mesh.shape.sequence_parallel)


def _same_weights(mesh: Mesh) -> Iterator[tuple[Holders, ProcessGroup | None, tuple[int, ...]]]:
    """Groups of ranks that hold the same, with their members; every rank has the same order."""
    yield "stage", mesh.groups.stage, mesh.stage_ranks
    copies = mesh.shape.key_copies
    if copies is not None:
        yield "block", mesh.groups.block, mesh.shape.block_ranks(mesh.at)
        if copies > 1:
            yield "keys", mesh.groups.keys, mesh.shape.block_ranks(mesh.at, copies=copies)


def _parameter(key: str) -> str | None:
    """The parameter that an entry of an optimizer's state belongs to; None for the step."""
    if key == STEP_KEY:
        return None
    for prefix in (MODEL_PREFIX, *(f"optimizer.{moment}." for moment in MOMENTS)):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    raise AssertionError(f"{key} is no part of an optimizer's state")
