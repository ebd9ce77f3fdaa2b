"""Shard of a run's weights, gradients and optimizer state that one rank holds.

A rank computes with the parameters of its stages: whole parameters or, with Megatron sequence
parallelism, its shards of them (:mod:`sppo.parallel.megatron`). Among ranks that hold the same
parameters, each rank updates the rows that :class:`sppo.parallel.data_parallel.GradientReducer`
assigns, so masters and moments exist once. From ZeRO-2 on, a rank also keeps only these rows of the
gradients, and reduces gradients after each use. With ZeRO-3 it also keeps only these rows of the
weights, and gathers parameters for use. If the vocabulary projection is tied to the embedding, the
first and the last stage both hold the embedding: their gradients are summed, both update it, and
checkpoints save that of the first stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.checkpoint.state_block import StateBlock, whole
from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, parameter_shapes
from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES
from sppo.engine.pipeline import Pipeline
from sppo.engine.providers.gathered_weights import GatheredWeights
from sppo.engine.providers.gradients import GradientProvider, ResidentGradients
from sppo.engine.providers.sharded_gradients import ShardedGradients
from sppo.engine.providers.weights import ResidentWeights, WeightProvider
from sppo.kernels.gradient_norm import sum_of_squares
from sppo.optim.adamw import STEP_KEY, global_norm
from sppo.optim.fused_adamw import MOMENTS
from sppo.parallel.data_parallel import GradientReducer, add_up
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.megatron import WeightSharding
from sppo.parallel.mesh import Mesh, ReplicaGroup

T = TypeVar("T")

_TIED = "embed.weight"


class ShardedState:
    """Sharding of weights, gradients and optimizer state, as seen by one rank.

    A rank *holds* the parameters of its stages (with Megatron, its shards of them). Of these it
    *keeps* all weights or, with ZeRO-3, only the rows that it updates; from ZeRO-1 on it *owns*,
    that is updates, only its share of the rows.

    Args:
        model: Model configuration.
        mesh: Mesh of all ranks; its shape says whether sequence-parallel groups shard weights.
        pipeline: The stages of this rank.
        device: Device that computes; weights and gradients may live in another tier.
        zero: ZeRO stage: 0 shards nothing, 1 shards the optimizer state among the ranks that hold
            the same weights, 2 also the gradients, 3 also the weights.
        bucket_bytes: Size in fp32 of a bucket of gradients that are reduced together.
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
        """Shapes of the parameters that this rank holds (with Megatron, shards), by global name."""
        self._whole_shapes = parameter_shapes(model)
        self._mesh = mesh
        self._groups = {
            kind: GradientReducer(
                mesh.groups.replicas.get(kind),
                shapes=self._shared_within(kind, self.shapes),
                shards_state=zero > 0,
                bucket_bytes=bucket_bytes,
                device=device,
            )
            for kind in mesh.replica_ranks
        }
        self._shards_gradients, self._shards_weights = zero >= 2, zero >= 3
        ends = mesh.shape.pipeline_parallel > 1 and model.tie_embeddings
        self._is_tied = ends and _TIED in self.shapes
        self._speaks_for_tied = not self._is_tied or mesh.at.pipeline == 0

    def _shared_within(self, kind: ReplicaGroup, names: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of ``names`` whose parameters the group ``kind`` shares."""
        return {name: v for name, v in names.items() if self.sharding.replica_group(name) == kind}

    def _group(self, name: str) -> GradientReducer:
        """Return the reducer of the ranks that hold the same shard of a parameter as this rank."""
        return self._groups[self.sharding.replica_group(name)]

    def resident_part(self, name: str, weight: Tensor) -> Tensor:
        """Return the part of a weight to keep between uses: all, or a copy of its rows (ZeRO-3)."""
        return self._own(name, weight, copy=True) if self._shards_weights else weight

    def _own(self, name: str, tensor: Tensor, *, copy: bool) -> Tensor:
        """Return the rows of a parameter that this rank updates: all, or a view or copy of some."""
        rows = _rows(tensor, self._group(name).own_rows(name))
        if rows.shape[0] == tensor.shape[0]:
            return tensor
        return rows.clone() if copy else rows

    def provider(self, weights: Mapping[str, Tensor]) -> WeightProvider:
        """Return the engine's provider of weights; every rank must call this at the same point.

        Args:
            weights: The :meth:`resident_part` of each parameter of this rank's stages, by
                global name, or a mapping that streams these parts to the device stage by stage.
        """
        if not self._shards_weights:
            return ResidentWeights(weights)
        groups = self._by_name((kind, self._mesh.gather_group(kind)) for kind in self._groups)
        if not groups:
            return ResidentWeights(weights)
        return GatheredWeights(weights, shapes=self.shapes, groups=groups)

    def _by_name(
        self, communicators: Iterable[tuple[ReplicaGroup, ProcessGroup | None]]
    ) -> dict[str, ProcessGroup]:
        """Return the communicator of each parameter's group of ranks, unless a rank is alone."""
        found: dict[str, ProcessGroup] = {}
        for kind, communicator in communicators:
            if communicator is not None:
                found |= self._shared_within(kind, dict.fromkeys(self.shapes, communicator))
        return found

    @property
    def names_of_stages(self) -> dict[int, list[str]]:
        """Global names of the parameters of each stage of this rank, by stage."""
        return {stage: [*shapes] for stage, shapes in self._by_stage.items()}

    @property
    def resident_shapes(self) -> dict[str, Shape]:
        """Shapes of the :meth:`resident_part` of each parameter, by global name."""
        return self._shapes_between_uses(are_sharded=self._shards_weights)

    @property
    def gradient_shapes(self) -> dict[str, Shape]:
        """Shapes of the gradient sums that this rank keeps during a step, by global name."""
        return self._shapes_between_uses(are_sharded=self._shards_gradients)

    def _shapes_between_uses(self, *, are_sharded: bool) -> dict[str, Shape]:
        if not are_sharded:
            return dict(self.shapes)
        return {name: self._owned_shape(name) for name in self.shapes}

    def _owned_shape(self, name: str) -> Shape:
        rows = self._group(name).own_rows(name)
        return (rows.stop - rows.start, *self.shapes[name][1:])

    @property
    def owned_shapes(self) -> dict[str, Shape]:
        """Shapes of the rows that this rank updates (:meth:`owned_rows`), by global name."""
        shapes = {name: self._owned_shape(name) for name in self.shapes}
        return {name: shape for name, shape in shapes.items() if shape[0]}

    def gradient_provider(self, gradients: Mapping[str, Tensor]) -> GradientProvider:
        """Return the engine's provider of gradients.

        Reductions after each use have the same communicators as reductions once per step: no rank
        does both, and nothing else uses these communicators during a step.

        Args:
            gradients: Gradient sums of :attr:`gradient_shapes`, by global name, or a mapping that
                streams them to another tier stage by stage.
        """
        groups = self._by_name(self._mesh.groups.replicas.items()) if self._shards_gradients else {}
        if groups:
            return ShardedGradients(gradients, shapes=self.shapes, groups=groups)
        return ResidentGradients(
            gradients,
            reduce=lambda stage: self._begin_reduction(stage, gradients),
            wait_reductions=self._end_reductions,
        )

    def owned_rows(self, tensors: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Tensor]:
        """Return the rows that this rank updates, by name, without parameters that have none.

        Args:
            tensors: Parameters or gradients that this rank holds, by global name, with all rows or
                only the rows that this rank updates.
            copy: Whether to copy rows that are a part of a tensor, so that the tensor can be freed.
        """
        owned = {name: self._own(name, tensor, copy=copy) for name, tensor in tensors.items()}
        return {name: rows for name, rows in owned.items() if rows.shape[0]}

    def _begin_reduction(self, stage: int, gradients: Mapping[str, Tensor]) -> None:
        """Start to reduce the gradients of a stage, which are complete and whole on this rank.

        A tied embedding that this rank's first stage holds, too, is reduced with the first stage,
        because only then it is complete.
        """
        names = self._by_stage[stage]
        first = min(self._by_stage)
        if stage != first:
            names = {n: shape for n, shape in names.items() if n not in self._by_stage[first]}
        for kind, group in self._groups.items():
            group.reduce(gradients, self._shared_within(kind, names))

    def _end_reductions(self) -> None:
        """Wait for all started reductions."""
        for group in self._groups.values():
            group.wait()

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        """Wait until ``gradients`` are summed over all ranks, in the rows that this rank updates.

        Sums a tied embedding's gradient over the first and the last stage.
        """
        self._end_reductions()
        if self._is_tied:
            rows = self._group(_TIED).own_rows(_TIED)
            ends = self._mesh.groups.ends
            assert ends is not None, "ranks that share a parameter are connected"
            own = _rows(gradients[_TIED], rows)
            what = "adding up the embedding's gradients"
            add_up([own], ends, what=what, device=self._device)

    def gather(self, weights: Mapping[str, Tensor]) -> None:
        """Fill the rows of ``weights`` that other ranks updated; nothing to do with ZeRO-3."""
        if self._shards_weights:
            return
        for kind, group in self._groups.items():
            group.gather(self._shared_within(kind, weights))

    def norm(
        self,
        gradients: Mapping[str, Tensor],
        peers: HostCollectives,
        *,
        after_each: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the Euclidean norm of the gradients of all parameters over all ranks.

        Args:
            gradients: Gradients that this rank keeps, by global name.
            peers: Collectives over all ranks.
            after_each: Called after each gradient has been read; None reads all gradients at once.
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
        """Return an optimizer's state over :meth:`owned_rows` as blocks of the whole model's."""
        return {key: self._block(key, tensor) for key, tensor in state.items()}

    def saved(self, state: Mapping[str, Tensor]) -> dict[str, StateBlock]:
        """Return the :meth:`blocks` of ``state`` that this rank saves in a checkpoint."""
        blocks = self.blocks(state)
        if self._speaks_for_tied:
            return blocks
        return {key: block for key, block in blocks.items() if _parameter(key) != _TIED}

    def _block(self, key: str, tensor: Tensor) -> StateBlock:
        name = _parameter(key)
        if name is None:
            return whole(tensor)
        shape = self.shapes[name]
        assert prod(tensor.shape[1:]) == prod(shape[1:]), f"{key}: {tensor.shape} of {shape}"
        first, *rest = self.sharding.offsets(name)
        offsets = (first + self._group(name).own_rows(name).start, *rest)
        return StateBlock(tensor, offsets, self._whole_shapes[name])


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    """Return ``rows`` of a parameter; ``tensor`` has all its rows, or already only ``rows``."""
    return tensor if tensor.shape[0] == rows.stop - rows.start else tensor[rows]


def weight_sharding(model: ModelConfig, mesh: Mesh) -> WeightSharding:
    """Return the sharding of the model's parameters on this rank."""
    if mesh.shape.key_copies is None:
        return WeightSharding(model)
    return WeightSharding(model, mesh.at.sequence, mesh.shape.sequence_parallel)


def _parameter(key: str) -> str | None:
    """Return the parameter name of a key of an optimizer's state; None for the step count."""
    if key == STEP_KEY:
        return None
    for prefix in (MODEL_PREFIX, *(f"optimizer.{moment}." for moment in MOMENTS)):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    raise AssertionError(f"{key} is no part of an optimizer's state")
