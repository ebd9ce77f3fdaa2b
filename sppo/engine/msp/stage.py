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

from sppo.activations.block_layout import ParcelShape
from sppo.activations.placement import ATTENTION
from sppo.config.model import ModelConfig
from sppo.cost.parameters import layer_shapes
from sppo.engine.msp.attention import PieceAttention, PrefixMeter
from sppo.engine.msp.shard import Piece
from sppo.engine.msp.weights import PieceGradients, PieceWeights
from sppo.engine.saved_rows import TensorRows, share, tensor_rows
from sppo.engine.saved_tensors import SavedTensors
from sppo.engine.stage import Stage
from sppo.kernels.attention.interface import Backend
from sppo.kernels.rotary import RotaryTable
from sppo.model.layer import Layer, Saved, Weights
from sppo.model.rope import rotary_table
from sppo.offload.moving_store import Itinerary, MovingStore, Place
from sppo.offload.store import ActivationKey, ActivationStore
from sppo.parallel.piece_exchange import PieceExchange, TokenMembers
from sppo.parallel.ulysses import HeadExchange
from sppo.planning.plan import SubsequencePlan
from sppo.planning.row_plan import RowPlan


@dataclass(frozen=True, slots=True)
class PieceMemory:
    """Most that a rank held of other ranks' stages."""

    layers: int
    """Layers' weights."""
    prefix_bytes: int
    """Keys and values with their gradients."""


class PieceStage:
    """Layers of one stage, for pieces of its units.

    Args:
        model: the shape.
        layers: of the stage.
        owner: the stage itself on the rank that owns it; None on helpers.
        gradients: the owner's fp32 sums by global name; None on helpers and in evaluation.
        activations: where saved tensors of pieces wait that stay on this rank's device.
        moved: where those wait that leave it; None where none does.
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
        moved: MovingStore | None = None,
        rows: RowPlan,
        heads: HeadExchange | None,
        members: TokenMembers,
        dtype: torch.dtype,
        device: torch.device,
        attention_backend: Backend = "auto",
    ) -> None:
        self._model, self._layers, self._owner = model, layers, owner
        self._gradients, self._activations, self._row_plan = gradients, activations, rows
        self._moved, self._saved = moved, SavedTensors(activations, moved)
        self._parcels = ParcelShape(model, dtype.itemsize, layers=len(layers))
        self._planned_itinerary: tuple[object, Itinerary] | None = None
        self._heads, self._dtype, self._device = heads, dtype, device
        self._backend: Backend = attention_backend
        self._layer = Layer(model)
        self._shapes = layer_shapes(model)
        own = None if owner is None else owner.weights
        self._members = members
        self._weights = PieceWeights(model, own=own, members=members, dtype=dtype, device=device)
        self._meter = PrefixMeter()
        self._plans: dict[tuple[int, int], SubsequencePlan] = {}

    @property
    def most_held(self) -> PieceMemory:
        """Since the rank began."""
        return PieceMemory(self._weights.most_layers, self._meter.peak_bytes)

    def prepare(self, lengths: Mapping[int, tuple[int, ...]], pieces: Sequence[Piece]) -> None:
        """Make room for what this rank's pieces of a step save.

        Args:
            lengths: tokens of the subsequences of every sequence.
            pieces: in the order of their backwards.

        Raises:
            OSError: the disk cannot take what is moved.
        """
        self._plans = {
            (sequence, index): plan
            for sequence, parts in lengths.items()
            for index, plan in enumerate(self._row_plan.subsequences(parts))
        }
        if self._moved is None:
            return
        key = [(piece.unit.sequence, piece.unit.subsequence, piece.cuts) for piece in pieces]
        if self._planned_itinerary is None or self._planned_itinerary[0] != key:
            self._planned_itinerary = key, self._itinerary(pieces)
        self._moved.prepare(self._planned_itinerary[1])  # the same object for the same step

    def _itinerary(self, pieces: Sequence[Piece]) -> Itinerary:
        """Where the moved tensors of ``pieces`` lie: those of a sequence one behind the other."""
        places: dict[ActivationKey, Place] = {}
        end, sequence = 0, -1
        for piece in pieces:
            if piece.unit.sequence != sequence:  # one sequence runs after another
                end, sequence = 0, piece.unit.sequence
            plan = self._plan(piece)[piece.member]
            # Every layer saves its input: pieces rebuild nothing out of the layer below.
            sizes = self._parcels.parcels(plan.moved, attention_saved=plan.rebuilt[ATTENTION] == 0)
            for index, size in zip(self._layers, sizes, strict=True):
                places[_key(piece, index)] = Place(end, size)
                end += size
        order = [_key(piece, index) for piece in pieces for index in reversed(self._layers)]
        return Itinerary(
            places,
            order,
            staging_slots=self._parcels.staging_slots,
            ring_slots=self._parcels.ring_slots,
        )

    def forward(
        self,
        piece: Piece,
        x_cE: Tensor | None,
        exchange: PieceExchange,
        *,
        loss_scale: float | None,
    ) -> Tensor | None:
        """Run one piece forward, together with the others of its unit.

        Args:
            piece: of this rank.
            x_cE: output of the previous stage; None on the first.
            exchange: with the ranks of the other pieces.
            loss_scale: see :meth:`sppo.engine.stage.Stage.forward`.

        Returns:
            Output ``[c, E]`` for the next stage, None on the last.
        """
        attentions: dict[int, PieceAttention] = {}

        def prefix(index: int) -> tuple[Tensor, ...]:
            attentions[index] = self._attention(piece, index, exchange)
            return attentions[index].prefix()

        self._weights.begin(self._layers, exchange, prefix)
        x = self._embedded(piece, exchange) if x_cE is None else x_cE
        rotary = self._rotary(piece)
        for index in self._layers:
            keep = frozenset[str]() if loss_scale is None else frozenset(self._rows(piece))
            with self._visit(index) as weights:
                x, saved = self._layer.forward(
                    x,
                    weights,
                    rotary=rotary,
                    attention=attentions.pop(index),
                    keep=keep,
                )
            if loss_scale is not None:
                self._saved.save(_key(piece, index), saved, self._rows(piece))
            del saved
        if self._layers.stop < self._model.num_layers:
            return x
        whole_CE = exchange.gather(x, piece.sizes)
        if whole_CE is not None:
            assert self._owner is not None, "the owner of the last stage has the head"
            self._owner.loss(piece.unit, whole_CE, loss_scale)
        return None

    def backward(
        self, piece: Piece, dy_cE: Tensor | None, exchange: PieceExchange
    ) -> Tensor | None:
        """Run one piece backward, together with the others.

        Returns:
            Gradient of the input ``[c, E]``, None on the first stage.
        """
        self._weights.begin(reversed(self._layers), exchange)
        dx = self._loss_gradient(piece, exchange) if dy_cE is None else dy_cE
        rotary = self._rotary(piece)
        for index in reversed(self._layers):
            saved = self._saved.take(_key(piece, index))
            dx = self._layer_backward(piece, index, dx, saved, rotary, exchange)
            self._saved.release(_key(piece, index))
        if piece.unit.span.start == 0 and self._owner is not None:
            self._owner.release_sequence(piece.unit.sequence)
        if self._layers.start > 0:
            return dx
        whole_CE = exchange.gather(dx, piece.sizes)
        if whole_CE is not None:
            assert self._owner is not None, "the owner of the first stage has the embedding"
            self._owner.embed_backward(piece.unit, whole_CE)
        return None

    def assert_idle(self) -> None:
        """Nothing may be left after a step."""
        assert self._moved is None or not self._moved.num_entries, "moved tensors are left over"
        assert not self._activations.num_entries, "saved tensors of pieces are left over"

    def discard(self) -> None:
        """Forget a step that failed."""
        if self._moved is not None:
            self._moved.discard()
        self._activations.discard()
        self._weights.discard()
        self._meter.held_bytes = 0

    def _layer_backward(
        self,
        piece: Piece,
        index: int,
        dy_cE: Tensor,
        saved: Saved,
        rotary: RotaryTable | None,
        exchange: PieceExchange,
    ) -> Tensor:
        attention = self._attention(piece, index, exchange)
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

    def _embedded(self, piece: Piece, exchange: PieceExchange) -> Tensor:
        """This piece of the first stage's input, which the owner looks up."""
        own = self._empty(piece)
        if self._owner is None:
            return exchange.scatter(None, own)
        return exchange.scatter(_split(self._owner.embed(piece.unit), piece), own)

    def _loss_gradient(self, piece: Piece, exchange: PieceExchange) -> Tensor:
        """This piece of the gradient that the owner of the last stage formed in forward."""
        own = self._empty(piece)
        if self._owner is None:
            return exchange.scatter(None, own)
        return exchange.scatter(_split(self._owner.take_loss_gradient(piece.unit), piece), own)

    def _empty(self, piece: Piece) -> Tensor:
        shape = (piece.tokens, self._model.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _plan(self, piece: Piece) -> tuple[SubsequencePlan, ...]:
        """Of this piece's tokens on each rank that shares them."""
        plan = self._plans[piece.unit.sequence, piece.unit.subsequence]
        everyones = [
            cuts[place + 1] - cuts[place] for cuts in piece.cuts for place in range(len(cuts) - 1)
        ]
        shares = share(plan, everyones)
        pieces = len(piece.sizes)
        return shares[piece.place :: pieces]

    def _rows(self, piece: Piece) -> dict[str, TensorRows]:
        return tensor_rows(self._plan(piece)[piece.member], self._model, own_input=True)

    def _attention(self, piece: Piece, index: int, exchange: PieceExchange) -> PieceAttention:
        model, heads = self._model, self._heads
        key_heads = model.kv_heads if heads is None else heads.share.keys
        key = (piece.unit.sequence, piece.unit.subsequence)
        missing = piece.parts
        if key in self._plans:
            missing = tuple(plan.rebuilt[ATTENTION] for plan in self._plan(piece))
        return PieceAttention(
            piece,
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

    def _sink(self, index: int, exchange: PieceExchange) -> PieceGradients:
        totals = None
        if self._owner is not None:
            assert self._gradients is not None, "training needs gradient buffers"
            totals = {name: self._gradients[f"layers.{index}.{name}"] for name in self._shapes}
        return PieceGradients(
            exchange,
            totals=totals,
            members=self._members,
            shapes=self._shapes,
            dtype=self._dtype,
            device=self._device,
        )

    def _rotary(self, piece: Piece) -> RotaryTable | None:
        if self._model.position != "rotary":
            return None
        return rotary_table(self._model, piece.positions_c, dtype=self._dtype)


def _split(whole_CE: Tensor, piece: Piece) -> list[Tensor]:
    return list(torch.split(whole_CE, list(piece.sizes)))


def _key(piece: Piece, layer: int) -> ActivationKey:
    return ActivationKey(piece.unit.sequence, piece.unit.subsequence, layer)
