"""Flat rows of a run's weights and gradients on one rank, and the intervals that it updates.

A rank computes with the parameters of its stages: whole parameters or, with Megatron sequence
parallelism, its shards of them (:mod:`sppo.parallel.megatron`). Each weight part is one flat row
(:mod:`sppo.parallel.flat_row`), of which each of the ranks that hold the same parameters has an
interval. A part of which only some parameters train has two rows: one of these, and one of frozen
parameters, which have no gradients, masters and moments. ZeRO says what is kept of this interval
only: from ZeRO-1 on masters and moments, from ZeRO-2 on also the gradients, which are then reduced
after each use, and with ZeRO-3 also the weights, which are gathered for use. If the vocabulary
projection is tied to the embedding, the first and the last stage both hold the embedding: their
gradients are summed, both update it, and checkpoints save that of the first stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.checkpoint.state_block import StateBlock, blocks_of_interval, whole
from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, parameter_kind
from sppo.cost.sharding.collectives import REDUCE_BUCKET_BYTES
from sppo.cost.state_tiers import StateTiers
from sppo.cost.trainable import EVERYTHING, Trainable
from sppo.engine.pipeline import Pipeline
from sppo.engine.providers.gathered_weights import GatheredWeights
from sppo.engine.providers.gradients import GradientProvider
from sppo.engine.providers.part_rows import PartRows, Rows
from sppo.engine.providers.sharded_gradients import ShardedGradients
from sppo.engine.providers.weights import WeightProvider
from sppo.optim.adamw import STEP_KEY
from sppo.optim.fused_adamw import MOMENTS
from sppo.optim.gradient_norm import global_norm, sum_of_squares
from sppo.optim.rank_parameters import RankParameters
from sppo.parallel.flat_row import FlatRow, RowPart
from sppo.parallel.host_collectives import HostCollectives
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.mesh import Mesh, ReplicaGroup
from sppo.parallel.row_messages import RowBuckets

_TIED = "embed.weight"


class ShardedState:
    """Sharding of weights, gradients and optimizer state, as seen by one rank.

    Weights and gradients are mappings of the keys of their flat rows to whole rows, padding
    included, or to this rank's shards of them.

    Args:
        model: Model configuration.
        mesh: Mesh of all ranks; its shape says whether sequence-parallel groups shard weights.
        pipeline: The stages of this rank.
        device: Device that computes; weights and gradients may live in another tier.
        zero: ZeRO stage: 0 shards nothing, 1 shards the optimizer state among the ranks that hold
            the same weights, 2 also the gradients, 3 also the weights.
        trainable: Factors of adapters, and which parameters train.
        bucket_bytes: Size in fp32 of a bucket of gradients that are reduced together.
        notes_added: Whether each step notes :attr:`added_norms`.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        mesh: Mesh,
        pipeline: Pipeline,
        device: torch.device,
        zero: int,
        trainable: Trainable = EVERYTHING,
        bucket_bytes: int = REDUCE_BUCKET_BYTES,
        notes_added: bool = False,
    ) -> None:
        self._mesh, self._device, self._zero = mesh, device, zero
        self._held = RankParameters(model, mesh=mesh, pipeline=pipeline, trainable=trainable)
        self.sharding, self.shapes = self._held.sharding, self._held.shapes
        """Shards that this rank has of all parameters, and their shapes, by global name."""
        self.keys_of_stages = self._held.of_stages
        """Keys of the rows of each stage of this rank, by stage."""
        self._whole_shapes = trainable.parameter_shapes(model)
        self._trained_kinds = dict.fromkeys(map(parameter_kind, trainable.trained_shapes(model)))
        self._notes_added = notes_added
        self.added_norms: dict[str, Tensor] = {}
        """Norms of what this rank added to gradients in a step, before they are reduced over ranks,
        0-d, by key of the row; reduced after each use, they are added up."""
        self._buckets = {
            kind: RowBuckets(
                mesh.groups.replicas.get(kind),
                shards_state=zero > 0,
                bucket_bytes=bucket_bytes,
                device=device,
            )
            for kind in mesh.replica_ranks
        }
        self._updates = {
            name: part
            for name, key in self._held.keys.items()
            if key in self._held.trained
            and (part := self._held.layouts[key].part(name, self._updated(key))) is not None
        }
        ends = mesh.shape.pipeline_parallel > 1 and model.tie_embeddings
        self._is_tied = ends and _TIED in self._held.trained
        self._speaks_for_tied = not self._is_tied or mesh.at.pipeline == 0

    def _updated(self, key: str) -> slice:
        """Return the interval of a row that this rank updates."""
        layout = self._held.layouts[key]
        return layout.own if self._zero else slice(0, layout.elements)

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """Shapes of the rows of weights that this rank keeps between uses, by key."""
        return _row_shapes(self._held.layouts, are_sharded=self._zero >= 3)

    @property
    def gradient_shapes(self) -> dict[str, Shape]:
        """Shapes of the rows of gradient sums that this rank keeps during a step, by key.

        There are none of frozen parameters.
        """
        return _row_shapes(self._held.trained, are_sharded=self._zero >= 2)

    @property
    def owned_shapes(self) -> dict[str, Shape]:
        """Shapes of what this rank updates of each parameter (:meth:`owned`), by global name."""
        return {name: self._owned_shape(name) for name in self._updates}

    def _owned_shape(self, name: str) -> Shape:
        elements, shape = self._updates[name].elements, self.shapes[name]
        count = elements.stop - elements.start
        return shape if count == prod(shape) else (count,)

    def owned(self, rows: Rows) -> dict[str, Tensor]:
        """Return what this rank updates of each parameter, as views by global name.

        A parameter that this rank updates whole has its shape; of others, this is an interval of
        the flattened parameter. Parameters of which it updates nothing are left out, as are frozen
        ones.
        """
        return {
            name: self._updated_of(rows, self._held.keys[name])[part.within].view(
                self._owned_shape(name)
            )
            for name, part in self._updates.items()
        }

    def _updated_of(self, rows: Rows, key: str) -> Tensor:
        """Return what this rank updates of a row."""
        return self._held.layouts[key].within(rows[key], self._updated(key))

    def owned_of(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return what this rank updates of a whole parameter, as :meth:`owned` does."""
        if name not in self._updates:
            return {}
        own = weight.reshape(-1)[self._updates[name].elements]
        return {name: own.view(self._owned_shape(name))}

    def streamed_keys(self, tiers: StateTiers) -> list[str]:
        """Return the keys of the rows of weights that live in another tier than the device."""
        if not tiers.streams_weights:
            return []
        stays = {} if tiers.streams_trained_weights else self._held.trained
        return [key for key in self._held.layouts if key not in stays]

    def fill(self, rows: Rows, name: str, weight: Tensor) -> None:
        """Copy what ``rows`` keep of a whole parameter to its place in them."""
        layout, row = self._held.layouts[self._held.keys[name]], rows[self._held.keys[name]]
        part = layout.part(name, layout.kept(row))
        if part is not None:
            row[part.within].copy_(weight.reshape(-1)[part.elements])

    def named(self, rows: Rows) -> PartRows:
        """Return the parameters of whole ``rows`` by global name."""
        return PartRows(rows, self._held.layouts, {})

    def provider(self, weights: Rows) -> WeightProvider:
        """Return the engine's provider of weights; every rank must call this at the same point.

        Args:
            weights: Rows of :attr:`weight_shapes`, or a mapping that streams them to the device
                stage by stage.
        """
        if self._zero >= 3:
            groups = self._by_row({kind: self._mesh.gather_group(kind) for kind in self._buckets})
            if groups:
                return GatheredWeights(PartRows(weights, self._held.layouts, groups))
        return WeightProvider(self.named(weights))

    def gradient_provider(self, gradients: Rows) -> GradientProvider:
        """Return the engine's provider of gradients.

        Reductions after each use have the same communicators as reductions once per step: no rank
        does both, and nothing else uses these communicators during a step.

        Args:
            gradients: Rows of :attr:`gradient_shapes`, or a mapping that streams them to another
                tier stage by stage.
        """
        groups = self._by_row(self._mesh.groups.replicas) if self._zero >= 2 else {}
        if groups:
            note = self._note_added if self._notes_added else None
            return ShardedGradients(PartRows(gradients, self._held.layouts, groups), note=note)
        return GradientProvider(
            self.named(gradients),
            reduce=lambda stage: self._begin_reduction(stage, gradients),
            wait_reductions=self._end_reductions,
        )

    def _by_row(
        self, communicators: Mapping[ReplicaGroup, ProcessGroup | None]
    ) -> dict[str, ProcessGroup]:
        """Return the communicator of each row's group of ranks, unless this rank is alone."""
        found = {key: communicators.get(kind) for key, kind in self._held.kinds.items()}
        return {key: group for key, group in found.items() if group is not None}

    def _begin_reduction(self, stage: int, gradients: Rows) -> None:
        """Start to reduce the gradients of a stage, which are complete and whole on this rank.

        A tied embedding that this rank's first stage holds, too, is reduced with the first stage,
        because only then it is complete.
        """
        first = min(self.keys_of_stages)
        for key in self.keys_of_stages[stage]:
            is_earlier = stage != first and key in self.keys_of_stages[first]
            if key in self._held.trained and not is_earlier:
                if self._notes_added:
                    self._note_added(key, gradients[key])
                self._buckets[self._held.kinds[key]].reduce(gradients[key])

    def _note_added(self, key: str, row: Tensor) -> None:
        """Add the norm of what this rank adds to a row of gradients to :attr:`added_norms`."""
        norm, before = torch.linalg.vector_norm(row), self.added_norms.get(key)
        self.added_norms[key] = norm if before is None else before + norm

    def _end_reductions(self) -> None:
        """Wait for all started reductions."""
        for buckets in self._buckets.values():
            buckets.wait()

    def finish(self, gradients: Rows) -> None:
        """Wait until ``gradients`` are summed over all ranks, in the intervals this rank updates.

        Sums a tied embedding's gradient over the first and the last stage.
        """
        with peer_errors("adding up gradients"):
            self._end_reductions()
            if self._is_tied:
                ends = self._mesh.groups.ends
                assert ends is not None, "ranks that share a parameter are connected"
                own = self._updated_of(gradients, _TIED)
                total = own.to(self._device)
                dist.all_reduce(total, group=ends)
                own.copy_(total)

    def gather(self, weights: Rows) -> None:
        """Fill the intervals of ``weights`` that other ranks updated, unless they keep shards."""
        if self._zero >= 3:
            return
        with peer_errors("gathering weights"):
            for key in self._held.trained:
                self._buckets[self._held.kinds[key]].gather(weights[key])
            self._end_reductions()

    def norm(
        self,
        gradients: Rows,
        peers: HostCollectives,
        *,
        after_each: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the Euclidean norm of the gradients of all parameters over all ranks.

        Args:
            gradients: Rows of gradients that this rank keeps.
            peers: Collectives over all ranks.
            after_each: Called after each tensor has been read; None reads all at once.
        """
        if not self._mesh.is_distributed:
            return global_norm(self.owned(gradients), after_each=after_each)
        counted = [
            layout.within(gradients[key], layout.own)
            for key, layout in self._held.trained.items()
            if key != _TIED or self._speaks_for_tied
        ]
        squares = float(sum_of_squares(counted, after_each=after_each)) if counted else 0.0
        (total,) = peers.total([squares])
        dtype = next((row.dtype for row in gradients.values()), torch.float32)
        return torch.tensor(total**0.5, dtype=dtype)

    def squares_by_kind(
        self, tensors: Mapping[str, Tensor], *, after_each: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Return the sums of squares by kind of parameter, for all kinds that train.

        Each element counts on one rank only, so the sums over all ranks are those of the model.

        Args:
            tensors: Tensors like what this rank updates (:meth:`owned`), by global name.
            after_each: Called after each tensor has been read.
        """
        of_kind: dict[str, list[Tensor]] = {kind: [] for kind in self._trained_kinds}
        for name, update in self._updates.items():
            layout, begin = self._held.layouts[self._held.keys[name]], update.elements.start
            own = layout.part(name, layout.own)
            if own is not None and (name != _TIED or self._speaks_for_tied):
                within = slice(own.elements.start - begin, own.elements.stop - begin)
                of_kind[parameter_kind(name)].append(tensors[name].reshape(-1)[within])
        return {
            kind: float(sum_of_squares(parts, after_each=after_each)) if parts else 0.0
            for kind, parts in of_kind.items()
        }

    def blocks(self, state: Mapping[str, Tensor]) -> dict[str, list[StateBlock]]:
        """Return an optimizer's state over :meth:`owned` as blocks of the whole model's tensors."""
        return {key: self._blocks(key, tensor) for key, tensor in state.items()}

    def saved(self, state: Mapping[str, Tensor]) -> dict[str, list[StateBlock]]:
        """Return the :meth:`blocks` of ``state`` that this rank saves in a checkpoint."""
        blocks = self.blocks(state)
        if self._speaks_for_tied:
            return blocks
        return {key: own for key, own in blocks.items() if _parameter(key) != _TIED}

    def weight_blocks(self, rows: Rows) -> dict[str, list[StateBlock]]:
        """Return what ``rows`` of weights keep, as blocks of the tensors of a checkpoint."""
        return {
            MODEL_PREFIX + part.name: self._blocks_from(part.name, own, begin=part.elements.start)
            for part, own in self._kept(rows)
        }

    def frozen(self, rows: Rows) -> dict[str, Tensor]:
        """Return what ``rows`` of weights keep of frozen parameters, flat, by tensor of a model."""
        return {
            MODEL_PREFIX + part.name: own
            for part, own in self._kept(rows)
            if self._held.keys[part.name] not in self._held.trained
        }

    def _kept(self, rows: Rows) -> Iterator[tuple[RowPart, Tensor]]:
        """Yield each parameter's part that ``rows`` keep, and its values, flat."""
        for name, key in self._held.keys.items():
            layout, row = self._held.layouts[key], rows[key]
            part = layout.part(name, layout.kept(row))
            if part is not None:
                yield part, row[part.within]

    def _blocks(self, key: str, tensor: Tensor) -> list[StateBlock]:
        name = _parameter(key)
        if name is None:
            return [whole(tensor)]
        return self._blocks_from(name, tensor, begin=self._updates[name].elements.start)

    def _blocks_from(self, name: str, tensor: Tensor, *, begin: int) -> list[StateBlock]:
        return blocks_of_interval(
            tensor,
            begin=begin,
            shape=self.shapes[name],
            offsets=self.sharding.offsets(name),
            global_shape=self._whole_shapes[name],
        )


def _row_shapes(layouts: Mapping[str, FlatRow], *, are_sharded: bool) -> dict[str, Shape]:
    return {
        key: (layout.shard_elements if are_sharded else layout.padded_elements,)
        for key, layout in layouts.items()
    }


def _parameter(key: str) -> str | None:
    """Return the parameter name of a key of an optimizer's state; None for the step count."""
    if key == STEP_KEY:
        return None
    for prefix in (MODEL_PREFIX, *(f"optimizer.{moment}." for moment in MOMENTS)):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    raise AssertionError(f"{key} is no part of an optimizer's state")
