"""One pipeline stage as the ranks see it that run pieces of its units (MSP).

The same layers as :class:`sppo.engine.stage.Stage`, walked by all ranks of a gang at once: weights
come from the owner layer by layer, keys and values are shared, gradients go home. What a piece
saves stays on the rank that ran it. Embedding and loss are the owner's: it hands out the pieces of
the first stage's input and collects those of the last stage's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.activations.block_layout import BlockLayout
from sppo.activations.placement import ATTENTION
from sppo.config.model import ModelConfig
from sppo.cost.parameters import layer_shapes
from sppo.engine.msp.attention import MspAttention, PrefixMeter
from sppo.engine.msp.shard import MspShard
from sppo.engine.msp.weights import MspGradients, MspWeights
from sppo.engine.saved_rows import TensorRows, share, tensor_rows
from sppo.engine.saved_tensors import SavedTensors
from sppo.engine.stage import Stage
from sppo.kernels.attention.interface import Backend
from sppo.kernels.rotary import RotaryTable
from sppo.model.layer import Layer, Saved, Weights
from sppo.model.rope import rotary_table
from sppo.offload.offload_store import Extent, OffloadSchedule, OffloadStore
from sppo.offload.store import ActivationKey, ActivationStore
from sppo.parallel.msp_exchange import MspExchange, TokenMembers
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.planning.plan import SubsequencePlan
from sppo.planning.row_plan import RowPlan


@dataclass(frozen=True, slots=True)
class MspMemory:
    """Most that a rank held of other ranks' stages."""

    layers: int
    """Layers' weights."""
    prefix_bytes: int
    """Keys and values with their gradients."""


class MspStage:
    """Layers of one stage, for pieces of its units.

    Args:
        model: the shape.
        layers: of the stage.
        owner: the stage itself on the rank that owns it; None on helpers.
        gradients: the owner's fp32 sums by global name; None on helpers and in evaluation.
        activations: where saved tensors of pieces wait that stay on this rank's device.
        offloaded: where those wait that leave it; None where none does.
        rows: what the plan does with the stage's saved tensors.
        heads: exchange with the ranks that share tokens; None where nobody does.
        members: the same ranks, as they share out what is sent between stages.
        dtype: of weights and activations.
        device: of this rank.
        attention_backend: of :func:`sppo.kernels.attention.interface.attention_forward`.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        layers: range,
        owner: Stage | None,
        gradients: Mapping[str, Tensor] | None,
        activations: ActivationStore,
        offloaded: OffloadStore | None = None,
        rows: RowPlan,
        heads: UlyssesAllToAll | None,
        members: TokenMembers,
        dtype: torch.dtype,
        device: torch.device,
        attention_backend: Backend = "auto",
    ) -> None:
        self._model, self._layers, self._owner = model, layers, owner
        self._gradients, self._activations, self._row_plan = gradients, activations, rows
        self._offloaded, self._saved = offloaded, SavedTensors(activations, offloaded)
        self._blocks = BlockLayout(model, dtype.itemsize, layers=len(layers))
        self._planned_offloads: tuple[object, OffloadSchedule] | None = None
        self._heads, self._dtype, self._device = heads, dtype, device
        self._backend: Backend = attention_backend
        self._layer = Layer(model)
        self._shapes = layer_shapes(model)
        own = None if owner is None else owner.weights
        self._members = members
        self._weights = MspWeights(model, own=own, members=members, dtype=dtype, device=device)
        self._meter = PrefixMeter()
        self._plans: dict[tuple[int, int], SubsequencePlan] = {}

    @property
    def most_held(self) -> MspMemory:
        """Since the rank began."""
        return MspMemory(self._weights.most_layers, self._meter.peak_bytes)

    def prepare(self, lengths: Mapping[int, tuple[int, ...]], shards: Sequence[MspShard]) -> None:
        """Make room for what this rank's pieces of a step save.

        Args:
            lengths: tokens of the subsequences of every sequence.
            shards: in the order of their backwards.

        Raises:
            OSError: the disk cannot take what is moved.
        """
        self._plans = {
            (sequence, index): plan
            for sequence, parts in lengths.items()
            for index, plan in enumerate(self._row_plan.subsequences(parts))
        }
        if self._offloaded is None:
            return
        key = [(shard.unit.sequence, shard.unit.subsequence, shard.cuts) for shard in shards]
        if self._planned_offloads is None or self._planned_offloads[0] != key:
            self._planned_offloads = key, self._offloads(shards)
        self._offloaded.prepare(self._planned_offloads[1])  # the same object for the same step

    def _offloads(self, shards: Sequence[MspShard]) -> OffloadSchedule:
        """Where the moved tensors of ``shards`` lie: those of a sequence one behind the other."""
        places: dict[ActivationKey, Extent] = {}
        end, sequence = 0, -1
        for shard in shards:
            if shard.unit.sequence != sequence:  # one sequence runs after another
                end, sequence = 0, shard.unit.sequence
            plan = self._plan(shard)[shard.member]
            # Every layer saves its input: pieces rebuild nothing out of the layer below.
            sizes = self._blocks.blocks(
                plan.offloaded, attention_saved=plan.recomputed[ATTENTION] == 0
            )
            for index, size in zip(self._layers, sizes, strict=True):
                places[_key(shard, index)] = Extent(end, size)
                end += size
        order = [_key(shard, index) for shard in shards for index in reversed(self._layers)]
        return OffloadSchedule(
            places,
            order,
            staging_slots=self._blocks.staging_slots,
            ring_slots=self._blocks.ring_slots,
        )

    def forward(
        self,
        shard: MspShard,
        x_cE: Tensor | None,
        exchange: MspExchange,
        *,
        loss_scale: float | None,
    ) -> Tensor | None:
        """Run one piece forward, together with the others of its unit.

        Args:
            shard: of this rank.
            x_cE: output of the previous stage; None on the first.
            exchange: with the ranks of the other pieces.
            loss_scale: see :meth:`sppo.engine.stage.Stage.forward`.

        Returns:
            Output ``[c, E]`` for the next stage, None on the last.
        """
        attentions: dict[int, MspAttention] = {}

        def prefix(index: int) -> tuple[Tensor, ...]:
            attentions[index] = self._attention(shard, index, exchange)
            return attentions[index].prefix()

        self._weights.begin(self._layers, exchange, prefix)
        x = self._embedded(shard, exchange) if x_cE is None else x_cE
        rotary = self._rotary(shard)
        for index in self._layers:
            keep = frozenset[str]() if loss_scale is None else frozenset(self._rows(shard))
            with self._visit(index) as weights:
                x, saved = self._layer.forward(
                    x,
                    weights,
                    rotary=rotary,
                    attention=attentions.pop(index),
                    keep=keep,
                )
            if loss_scale is not None:
                self._saved.save(_key(shard, index), saved, self._rows(shard))
            del saved
        if self._layers.stop < self._model.num_layers:
            return x
        whole_CE = exchange.gather(x, shard.sizes)
        if whole_CE is not None:
            assert self._owner is not None, "the owner of the last stage has the head"
            self._owner.loss(shard.unit, whole_CE, loss_scale)
        return None

    def backward(
        self, shard: MspShard, dy_cE: Tensor | None, exchange: MspExchange
    ) -> Tensor | None:
        """Run one piece backward, together with the others.

        Returns:
            Gradient of the input ``[c, E]``, None on the first stage.
        """
        self._weights.begin(reversed(self._layers), exchange)
        dx = self._loss_gradient(shard, exchange) if dy_cE is None else dy_cE
        rotary = self._rotary(shard)
        for index in reversed(self._layers):
            saved = self._saved.take(_key(shard, index))
            dx = self._layer_backward(shard, index, dx, saved, rotary, exchange)
            self._saved.release(_key(shard, index))
        if shard.unit.span.start == 0 and self._owner is not None:
            self._owner.release_sequence(shard.unit.sequence)
        if self._layers.start > 0:
            return dx
        whole_CE = exchange.gather(dx, shard.sizes)
        if whole_CE is not None:
            assert self._owner is not None, "the owner of the first stage has the embedding"
            self._owner.embed_backward(shard.unit, whole_CE)
        return None

    def assert_idle(self) -> None:
        """Nothing may be left after a step."""
        assert self._offloaded is None or not self._offloaded.num_entries, (
            "moved tensors are left over"
        )
        assert not self._activations.num_entries, "saved tensors of pieces are left over"

    def abort(self) -> None:
        """Forget a step that failed."""
        if self._offloaded is not None:
            self._offloaded.abort()
        self._activations.abort()
        self._weights.abort()
        self._meter.held_bytes = 0

    def _layer_backward(
        self,
        shard: MspShard,
        index: int,
        dy_cE: Tensor,
        saved: Saved,
        rotary: RotaryTable | None,
        exchange: MspExchange,
    ) -> Tensor:
        attention = self._attention(shard, index, exchange)
        with self._visit(index) as weights:
            attention.fetch()
            self._layer.complete(saved, weights, rotary=rotary, attention=attention)
            sink = self._sink(index, exchange)
            dx = self._layer.backward(
                dy_cE,
                weights,
                saved=saved,
                gradients=sink,
                rotary=rotary,
                attention=attention,
            )
            sink.finish()
        return dx

    @contextmanager
    def _visit(self, index: int) -> Iterator[Weights]:
        try:
            yield self._weights.take(index)
        finally:
            self._weights.release()

    def _embedded(self, shard: MspShard, exchange: MspExchange) -> Tensor:
        """This piece of the first stage's input, which the owner looks up."""
        own = self._empty(shard)
        if self._owner is None:
            return exchange.scatter(None, own)
        return exchange.scatter(_split(self._owner.embed(shard.unit), shard), own)

    def _loss_gradient(self, shard: MspShard, exchange: MspExchange) -> Tensor:
        """This piece of the gradient that the owner of the last stage formed in forward."""
        own = self._empty(shard)
        if self._owner is None:
            return exchange.scatter(None, own)
        return exchange.scatter(_split(self._owner.take_loss_gradient(shard.unit), shard), own)

    def _empty(self, shard: MspShard) -> Tensor:
        shape = (shard.tokens, self._model.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _plan(self, shard: MspShard) -> tuple[SubsequencePlan, ...]:
        """Of this piece's tokens on each rank that shares them."""
        plan = self._plans[shard.unit.sequence, shard.unit.subsequence]
        all_gather = [
            cuts[place + 1] - cuts[place] for cuts in shard.cuts for place in range(len(cuts) - 1)
        ]
        shares = share(plan, all_gather)
        shards = len(shard.sizes)
        return shares[shard.place :: shards]

    def _rows(self, shard: MspShard) -> dict[str, TensorRows]:
        return tensor_rows(self._plan(shard)[shard.member], self._model, own_input=True)

    def _attention(self, shard: MspShard, index: int, exchange: MspExchange) -> MspAttention:
        model, heads = self._model, self._heads
        key_heads = model.kv_heads if heads is None else heads.share.keys
        key = (shard.unit.sequence, shard.unit.subsequence)
        missing = shard.parts
        if key in self._plans:
            missing = tuple(plan.recomputed[ATTENTION] for plan in self._plan(shard))
        return MspAttention(
            shard,
            exchange=exchange,
            heads=heads,
            missing=missing,
            store=None if self._owner is None else self._owner.kv,
            layer=index,
            window=model.window_of(index),
            shape=(key_heads, model.head_dim),
            dtype=self._dtype,
            device=self._device,
            backend=self._backend,
            meter=self._meter,
        )

    def _sink(self, index: int, exchange: MspExchange) -> MspGradients:
        totals = None
        if self._owner is not None:
            assert self._gradients is not None, "training needs gradient buffers"
            totals = {name: self._gradients[f"layers.{index}.{name}"] for name in self._shapes}
        return MspGradients(
            exchange,
            totals=totals,
            members=self._members,
            shapes=self._shapes,
            dtype=self._dtype,
            device=self._device,
        )

    def _rotary(self, shard: MspShard) -> RotaryTable | None:
        if self._model.position != "rotary":
            return None
        return rotary_table(self._model, shard.positions_c, dtype=self._dtype)


def _split(whole_CE: Tensor, shard: MspShard) -> list[Tensor]:
    return list(torch.split(whole_CE, list(shard.sizes)))


def _key(shard: MspShard, layer: int) -> ActivationKey:
    return ActivationKey(shard.unit.sequence, shard.unit.subsequence, layer)
