"""A run of consecutive layers on one rank, with the embedding and the head where it has them.

``forward`` and ``backward`` take one unit, a (sequence, subsequence) pair. On the last stage the
loss and the gradient of its input are formed in forward, tile by tile, so logits never wait for
backward.

Legend: C tokens of the subsequence, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor
from torch.nn import functional

from sppo.activations.block_layout import BlockLayout, block_offsets
from sppo.activations.placement import ATTENTION
from sppo.activations.policy import tensor_bytes_per_token
from sppo.config.model import ModelConfig
from sppo.engine.kv_store import KVStore
from sppo.engine.saved_rows import (
    TensorRows,
    check_whole_classes,
    share,
    tensor_rows,
)
from sppo.engine.saved_tensors import SavedTensors
from sppo.engine.subsequence_attention import KVCacheAttention
from sppo.engine.ulysses_attention import UlyssesAttention
from sppo.engine.unit import Unit
from sppo.engine.weights import Part, WeightProvider, visit
from sppo.kernels.attention.interface import Backend
from sppo.kernels.cross_entropy import (
    CROSS_ENTROPY,
    LossTerms,
    linear_cross_entropy,
    linear_cross_entropy_with_gradient,
)
from sppo.kernels.rotary import RotaryTable
from sppo.model.gradients import DeferredGradients, GradientSum
from sppo.model.layer import Layer, Saved, SubsequenceAttention, Weights, norm, norm_backward
from sppo.model.rope import rotary_table
from sppo.offload.lifo_arena_store import slot_bytes
from sppo.offload.offload_store import Extent, OffloadSchedule, OffloadStore
from sppo.offload.store import ActivationKey, ActivationStore
from sppo.parallel.megatron import MegatronSequenceParallel, ShardedTokens
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.planning.plan import SubsequencePlan
from sppo.planning.row_plan import RowPlan
from sppo.schedule.actions import ActionKind


class Stage:
    """Layers ``[first, last)`` of a model, run unit by unit.

    Args:
        model: the shape.
        weights: gives the parameters of the stage, in the compute dtype.
        gradients: fp32 (float64) buffers by global name, added to; None for forward only.
        activations: where saved tensors wait that stay on the device.
        offloaded: where those wait that leave it; None where none does.
        rows: what is kept, moved and rebuilt of each subsequence.
        input_every: layers that keep their attention output save their input only in every so
            manyth layer; the others get it from the layer below, see :meth:`_recompute_input`.
        layers: half-open range of layers; None for all.
        exchange: with the ranks that share every unit's tokens; None where nobody does. A
            :class:`MegatronSequenceParallel` where they share the layers' weights too.
        attention_backend: of :func:`sppo.kernels.attention.interface.attention_forward`.
        loss_terms: what training adds to the cross entropy; evaluation adds nothing.
        sends_keys: whether ranks that run pieces of its units get the stored K and V.
        debug: overwrite lent memory with NaN when it is given back.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        weights: WeightProvider,
        gradients: Mapping[str, Tensor] | None,
        activations: ActivationStore,
        rows: RowPlan,
        offloaded: OffloadStore | None = None,
        input_every: int = 1,
        layers: range | None = None,
        exchange: UlyssesAllToAll | MegatronSequenceParallel | None = None,
        attention_backend: Backend = "auto",
        loss_terms: LossTerms = CROSS_ENTROPY,
        sends_keys: bool = False,
        debug: bool = False,
    ) -> None:
        self._tensor = exchange if isinstance(exchange, MegatronSequenceParallel) else None
        self._heads = exchange if isinstance(exchange, UlyssesAllToAll) else None
        self.model = model if self._tensor is None else self._tensor.shares.own_model
        self._layers = range(model.num_layers) if layers is None else layers
        self._weights, self._gradients = weights, gradients
        self._activations, self._offloaded, self._row_plan = activations, offloaded, rows
        self._saved = SavedTensors(activations, offloaded)
        self._sequences_in_flight = 1
        self._backend: Backend = attention_backend
        self._loss_terms = loss_terms
        self.dtype = weights.dtype
        self._blocks = BlockLayout(
            self.model, weights.dtype.itemsize, layers=len(self._layers), input_every=input_every
        )
        self._plans: dict[tuple[int, int], SubsequencePlan] = {}
        self._missing: dict[tuple[int, int], tuple[int, ...]] = {}
        self._offloads: tuple[object, OffloadSchedule] | None = None
        self._residual_plans: dict[tuple[int, int], SubsequencePlan] = {}
        heads = None if self._heads is None else self._heads.share.keys
        self.kv = KVStore(
            self.model,
            dtype=weights.dtype,
            device=weights.device,
            heads=heads,
            sent=sends_keys,
            poison=debug,
        )
        self._layer_gradients = {i: _local(gradients or {}, f"layers.{i}.") for i in self._layers}
        self._token_losses: dict[tuple[int, int], Tensor] = {}
        self._deferred: dict[tuple[int, int], list[DeferredGradients]] = {}

    @cached_property
    def is_first(self) -> bool:
        """Whether the stage holds the embedding."""
        return self._layers.start == 0

    @cached_property
    def is_last(self) -> bool:
        """Whether the stage holds the final norm and the head."""
        return self._layers.stop == self.model.num_layers

    def prepare(
        self,
        units: Mapping[tuple[int, int], Unit],
        *,
        backward_order: Sequence[tuple[int, int]],
        sequences_in_flight: int = 1,
    ) -> None:
        """Make room for what ``units`` save, before the first of them runs.

        Args:
            units: of one training step, whole sequences.
            backward_order: the units in the order of their backwards.
            sequences_in_flight: sequences that hold saved tensors at once, always those that began
                one after another.

        Raises:
            MemoryError: there is not that much memory.
            OSError: the disk cannot take what is moved.
        """
        lengths: dict[int, tuple[int, ...]] = {}
        for sequence, subsequence in sorted(units):
            span = units[sequence, subsequence].span
            lengths[sequence] = (*lengths.get(sequence, ()), span.end - span.start)
        self._plans = {
            (sequence, index): plan
            for sequence, parts in lengths.items()
            for index, plan in enumerate(self._row_plan.subsequences(parts))
        }
        self._residual_plans = {}
        if self._tensor or self._heads:
            self._share_plans(units, lengths)
        by_sequence = dict.fromkeys(lengths, 0)
        for unit in units.values():
            by_sequence[unit.sequence] += self._retained_bytes(unit)
        self._sequences_in_flight = sequences_in_flight
        self._activations.reserve(max(by_sequence.values()) * sequences_in_flight)
        if self._offloaded is not None:
            self._offloaded.prepare(self._places(tuple(lengths.items()), tuple(backward_order)))

    def visits(self, kind: ActionKind, unit: Unit) -> Iterator[Part]:
        """Whose weights an action takes, in order; for backward after :meth:`prepare`."""
        if kind is ActionKind.F:
            if self.is_first:
                yield "embedding"
            yield from self._layers
            if self.is_last:
                yield "head"
        elif kind is ActionKind.B:
            yield from self._backward_visits(unit)

    def _backward_visits(self, unit: Unit) -> Iterator[int]:
        """From the last layer down; before one without its input, those that rebuild it."""
        attention_saved = _attention_saved(self._plans[unit.sequence, unit.subsequence])
        with_input = {
            index
            for index in self._layers
            if self._blocks.has_own_input(
                index - self._layers.start, attention_saved=attention_saved
            )
        }
        for index in reversed(self._layers):
            below = max(layer for layer in with_input if layer <= index)
            yield from range(below, index)
            with_input.update(range(below, index))
            yield index

    def forward(
        self, unit: Unit, x_CE: Tensor | None, *, loss_scale: float | None
    ) -> Tensor | None:
        """Run one unit forward.

        Args:
            unit: its tokens are read on the first stage, its labels on the last.
            x_CE: output of the previous stage; None on the first.
            loss_scale: factor of the summed loss; None runs forward only, nothing is saved.

        Returns:
            Output ``[C, E]`` for the next stage, None on the last.
        """
        training = loss_scale is not None
        x = self.embed(unit) if x_CE is None else x_CE
        rotary = self._rotary(unit)
        for index in self._layers:
            rows = self._rows(unit, index) if training else {}
            with visit(self._weights, index) as weights:
                x, saved = self._layer(unit).forward(
                    x,
                    weights,
                    rotary=rotary,
                    attention=self._attention(unit, index),
                    keep=frozenset(rows),
                )
            if training:
                self._saved.save(_key(unit, index), saved, rows)
            del saved  # or it would stay while the next layer runs
        if not self.is_last:
            return x
        self.loss(unit, x, loss_scale)
        return None

    def backward(
        self, unit: Unit, dy_CE: Tensor | None, *, defer_weights: bool = False
    ) -> Tensor | None:
        """Run one unit backward.

        Args:
            unit: as given to :meth:`forward`; units of a sequence come in descending order.
            dy_CE: gradient of the output; None on the last stage.
            defer_weights: leave the products that make weight gradients to
                :meth:`weight_gradients`. Their operands stay until then, so saved tensors that
                the stores lend are copied.

        Returns:
            Gradient of the input ``[C, E]``, None on the first stage.
        """
        assert self._gradients is not None, "a stage without gradient buffers runs forward only"
        if dy_CE is None:
            dy_CE = self.take_loss_gradient(unit)
        dx = dy_CE
        rotary = self._rotary(unit)
        take = self._saved.take_owned if defer_weights else self._saved.take
        taken: dict[int, Saved] = {}
        sinks = {index: self._sink(index, deferred=defer_weights) for index in self._layers}
        for index in reversed(self._layers):
            saved = taken.pop(index, None) or take(_key(unit, index))
            if "x_in" not in saved:
                self._recompute_input(unit, index, saved, taken, take, rotary)
            with visit(self._weights, index) as weights:
                self._complete(unit, index, saved, weights, rotary)
                dx = self._layer(unit).backward(
                    dx,
                    weights,
                    saved=saved,
                    gradients=sinks[index],
                    rotary=rotary,
                    attention=self._attention(unit, index),
                )
            self._saved.release(_key(unit, index))
        if defer_weights:
            deferred = [sink for sink in sinks.values() if isinstance(sink, DeferredGradients)]
            self._deferred[unit.sequence, unit.subsequence] = deferred[::-1]
        if unit.span.start == 0:
            self.kv.release(unit.sequence)
        if not self.is_first:
            return dx
        self.embed_backward(unit, dx)
        return None

    def weight_gradients(self, unit: Unit) -> None:
        """The half of a unit's backward that was left for later; once per unit."""
        for sink in self._deferred.pop((unit.sequence, unit.subsequence)):
            sink.add_up()

    def _sink(self, index: int, *, deferred: bool) -> GradientSum | DeferredGradients:
        """Where the weight gradients of layer ``index`` go."""
        totals = self._layer_gradients[index]
        return DeferredGradients(totals) if deferred else GradientSum(totals)

    def _recompute_input(
        self,
        unit: Unit,
        index: int,
        saved: Saved,
        taken: dict[int, Saved],
        take: Callable[[ActivationKey], Saved],
        rotary: RotaryTable | None,
    ) -> None:
        """Put x_in into ``saved`` of layer ``index``: the output of the layers below it.

        Given a layer's o, the residual stream goes on without attention: x_mid = x_in + o W_o,
        y = x_mid + MLP(x_mid), one product more per token than rebuilding the layer itself. What
        ``take`` takes out of the stores on the way waits in ``taken`` for its own turn.
        """
        below = index - 1
        if below not in taken:
            taken[below] = take(_key(unit, below))
        if "x_in" not in taken[below]:
            self._recompute_input(unit, below, taken[below], taken, take, rotary)
        with visit(self._weights, below) as weights:
            self._complete(unit, below, taken[below], weights, rotary)
            saved["x_in"] = self._layer(unit).recompute_output(taken[below], weights)

    def take_loss_gradient(self, unit: Unit) -> Tensor:
        """Gradient of the last stage's output ``[C, E]``, formed in forward; once per unit."""
        return self._activations.take(self._head_key(unit))["dx"]

    def pop_losses(self, sequence: int, subsequence: int) -> Tensor:
        """Unscaled loss of each token of a unit, ``[C]``; last stage only, once per unit."""
        return self._token_losses.pop((sequence, subsequence))

    def release_sequence(self, sequence: int) -> None:
        """Free a sequence's K/V after a forward-only pass."""
        self.kv.release(sequence)

    def assert_idle(self) -> None:
        """Nothing may be left after a step: every saved tensor was used exactly once."""
        leftovers = {
            "activations": self._activations.num_entries,
            "moved activations": 0 if self._offloaded is None else self._offloaded.num_entries,
            "sequences in the KV store": self.kv.num_sequences,
            "token losses": len(self._token_losses),
            "weight gradients": len(self._deferred),
        }
        assert not any(leftovers.values()), f"left over after the step: {leftovers}"
        self._weights.assert_idle()

    def abort(self) -> None:
        """Forget all state of a step that failed."""
        if self._offloaded is not None:
            self._offloaded.abort()  # first: copies under way may read what the others free
        self._activations.abort()
        self.kv.abort()
        self._token_losses.clear()
        self._deferred.clear()
        self._weights.abort()

    def _complete(
        self, unit: Unit, index: int, saved: Saved, weights: Weights, rotary: RotaryTable | None
    ) -> None:
        self._layer(unit).complete(
            saved,
            weights,
            rotary=rotary,
            attention=self._attention(unit, index),
        )

    def _share_plans(
        self, units: Mapping[tuple[int, int], Unit], lengths: Mapping[int, tuple[int, ...]]
    ) -> None:
        """Plans are of whole subsequences: turn them into those of this rank's tokens."""
        exchange = self._tensor or self._heads
        assert exchange is not None, "tokens are shared with somebody"
        for sequence, parts in lengths.items():
            offset = 0
            if self._tensor is not None:
                check_whole_classes(self._plans[sequence, index] for index in range(len(parts)))
            for index in range(len(parts)):
                key = (sequence, index)
                shares = share(self._plans[key], units[key].parts)
                rows = shares[exchange.rank]
                if self._tensor is not None:
                    self._residual_plans[key], rows = rows, self._plans[key]
                self._missing[key] = tuple(plan.recomputed[ATTENTION] for plan in shares)
                self._plans[key] = replace(rows, slot_offset_bytes=offset)
                offset += sum(self._block_bytes(key))

    def _block_bytes(self, key: tuple[int, int]) -> tuple[int, ...]:
        """Of each layer's moved tensors of a unit."""
        plan, residual = self._plans[key], self._residual_plans.get(key)
        return self._blocks.blocks(
            plan.offloaded,
            attention_saved=_attention_saved(plan),
            residual=None if residual is None else residual.offloaded,
        )

    def _retained_bytes(self, unit: Unit) -> int:
        """Bytes that stay in the activation store once ``unit`` ran forward."""
        element_bytes = self.dtype.itemsize
        sizes = tensor_bytes_per_token(self.model, element_bytes=element_bytes)
        total = 0
        for index in self._layers:
            rows = self._rows(unit, index)
            total += sum(slot_bytes((rows[name].retained,), sizes[name]) for name in rows)
        head = slot_bytes((unit.tokens_C.shape[0], self.model.hidden_size), element_bytes)
        return total + (head if self.is_last else 0)

    def _places(
        self,
        lengths: tuple[tuple[int, tuple[int, ...]], ...],
        backward_order: tuple[tuple[int, int], ...],
    ) -> OffloadSchedule:
        """Where the moved tensors of a step lie; the same object for the same step again."""
        if self._offloads is not None and self._offloads[0] == (lengths, backward_order):
            return self._offloads[1]
        offsets: dict[tuple[int, int], list[Extent]] = {}
        for unit, plan in self._plans.items():
            sizes = self._block_bytes(unit)
            starts = block_offsets(sizes, start=plan.slot_offset_bytes)
            offsets[unit] = [Extent(*place) for place in zip(starts, sizes, strict=True)]
        stride = max(sum(places[-1]) for places in offsets.values())
        places = {
            ActivationKey(*unit, self._layers[i]): Extent(
                place.offset_bytes + unit[0] % self._sequences_in_flight * stride,
                place.size_bytes,
            )
            for unit, of_layers in offsets.items()
            for i, place in enumerate(of_layers)
        }
        order = [
            ActivationKey(*unit, index)
            for unit in backward_order
            for index in reversed(self._layers)
        ]
        offloads = OffloadSchedule(
            places,
            order,
            staging_slots=self._blocks.staging_slots,
            ring_slots=self._blocks.ring_slots,
        )
        self._offloads = (lengths, backward_order), offloads
        return offloads

    def _rows(self, unit: Unit, index: int) -> dict[str, TensorRows]:
        """Rows that layer ``index`` saves of a unit, by tensor."""
        key = (unit.sequence, unit.subsequence)
        plan = self._plans[key]
        own_input = self._blocks.has_own_input(
            index - self._layers.start, attention_saved=_attention_saved(plan)
        )
        return tensor_rows(
            plan, self.model, own_input=own_input, residual=self._residual_plans.get(key)
        )

    def _head_key(self, unit: Unit) -> ActivationKey:
        return _key(unit, self.model.num_layers)

    @property
    def _head(self) -> str:
        return "embed.weight" if self.model.tie_embeddings else "head.weight"

    def _rotary(self, unit: Unit) -> RotaryTable | None:
        if self.model.position != "rotary":
            return None
        positions = unit.positions_C if self._tensor is None else unit.span_positions_C
        return rotary_table(self.model, positions, dtype=self.dtype)

    def _layer(self, unit: Unit) -> Layer:
        if self._tensor is None:
            return Layer(self.model)
        return Layer(self.model, ShardedTokens(self._tensor, unit.parts))

    def _attention(self, unit: Unit, index: int) -> SubsequenceAttention:
        window = self.model.window_of(index)
        stored = KVCacheAttention(self.kv, index, unit.sequence, unit.span, window, self._backend)
        if self._heads is None:
            return stored
        missing = self._missing.get((unit.sequence, unit.subsequence), unit.parts)
        return UlyssesAttention(stored, self._heads, unit.parts, missing)

    @property
    def weights(self) -> WeightProvider:
        """Of the stage."""
        return self._weights

    def embed(self, unit: Unit) -> Tensor:
        """The first stage's input, ``[C, E]``."""
        with visit(self._weights, "embedding") as weights:
            x = functional.embedding(unit.tokens_C, weights["embed.weight"])
            if self.model.position == "learned":
                x = x + functional.embedding(unit.positions_C, weights["positions.weight"])
        return x

    def embed_backward(self, unit: Unit, dx_CE: Tensor) -> None:
        """Add the embedding's gradient, given that of the first stage's input."""
        assert self._gradients is not None, "checked by backward"
        embed = self._gradients["embed.weight"]
        embed.index_add_(0, unit.tokens_C, dx_CE.to(embed.dtype))
        if self.model.position == "learned":
            positions = self._gradients["positions.weight"]
            positions.index_add_(0, unit.positions_C, dx_CE.to(positions.dtype))

    def loss(self, unit: Unit, x_CE: Tensor, loss_scale: float | None) -> None:
        """Form the losses of a unit from the last stage's output, and in training its gradient."""
        key = (unit.sequence, unit.subsequence)
        with visit(self._weights, "head") as weights:
            hidden = norm(self.model, "final_norm", x_CE, weights)
            if loss_scale is None:
                losses = linear_cross_entropy(hidden, weights[self._head], unit.labels_C)
            else:
                losses = self._loss_and_gradient(unit, x_CE, hidden, weights, loss_scale)
        self._token_losses[key] = losses

    def _loss_and_gradient(
        self, unit: Unit, x_CE: Tensor, hidden_CE: Tensor, weights: Weights, loss_scale: float
    ) -> Tensor:
        """Losses ``[C]`` of the normed output; saves the gradient of ``x_CE``."""
        assert self._gradients is not None, "training needs gradient buffers"
        losses, dhidden = linear_cross_entropy_with_gradient(
            hidden_CE,
            weights[self._head],
            unit.labels_C,
            scale=loss_scale,
            dweight_VE=self._gradients[self._head],
            terms=self._loss_terms,
        )
        sink = GradientSum(self._gradients)
        dx = norm_backward(self.model, "final_norm", dhidden, x_CE, weights, sink)
        self._activations.save(self._head_key(unit), {"dx": dx})
        return losses


def _key(unit: Unit, layer: int) -> ActivationKey:
    return ActivationKey(unit.sequence, unit.subsequence, layer)


def _attention_saved(plan: SubsequencePlan) -> bool:
    """Whether every layer's attention output is there for backward."""
    return plan.recomputed[ATTENTION] == 0


def _local(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
