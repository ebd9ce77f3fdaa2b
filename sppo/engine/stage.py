"""Consecutive layers that one rank runs, with the embedding or the head at the model's ends.

The first layers of the model have no backward if nothing trains in them or below them
(:mod:`sppo.cost.trainable`): they save nothing, and keep K and V only as long as the sequence runs
forward. No stage sends a gradient down to them.

``forward`` and ``backward`` take one unit, a (sequence, subsequence) pair, or an MSP shard of one.
Weights, sums of gradients, and keys and values come from providers
(:mod:`sppo.engine.stage_providers`).

Legend: C tokens of the unit on this rank, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial

from torch import Tensor

from sppo.activations.activation_layout import ActivationKey, ActivationLayout
from sppo.activations.block_layout import BlockLayout
from sppo.activations.subsequence_placement import SubsequencePlacement, check_whole_classes
from sppo.config.model import ModelConfig
from sppo.cost.trainable import layers_with_backward, trains_embedding
from sppo.engine.attention.prefix_attention import PrefixAttention
from sppo.engine.providers.part_rows import WeightPart
from sppo.engine.providers.weights import visit
from sppo.engine.recurrence.head_exchange import HeadExchange
from sppo.engine.recurrence.stored_recurrence import StoredRecurrence
from sppo.engine.saved_rows import cut, join
from sppo.engine.stage_providers import StageProviders
from sppo.engine.unit import Unit
from sppo.model.attention_mixer import AttentionMixer
from sppo.model.gradients import DeferredGradients, GradientSink
from sppo.model.heads import Heads
from sppo.model.layer import Layer
from sppo.model.linear_mixer import LinearMixer
from sppo.model.mixer import Mixer, Saved
from sppo.model.residual import TokenExchange
from sppo.model.rope import RotaryTables
from sppo.offload.retained import stacked_bytes
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.parallel.ulysses import UlyssesAllToAll
from sppo.schedule.actions import ActionKind, UnitKey
from sppo.schedule.transfers.copies import KVPlacement


class Stage:
    """Layers ``[first, last)`` of a model, run unit by unit.

    Args:
        model: Model configuration.
        layers: Half-open range of layers.
        providers: Weights, sinks of gradients, keys and values, and the model's ends; their stores
            are shared by all stages of the rank.
        input_every: Save the input of every `input_every`-th layer only, where attention outputs
            are saved; the other inputs are recomputed, see :meth:`_recompute_input`.
        recomputes_windows: Recompute K and V of layers with a sliding window in the backward of
            each unit if the stage retains K and V, and keep those that later units see alone, as
            evaluation always does.
        exchange: Communication with the ranks over which every unit's tokens are sharded; None if
            they are not. A :class:`MegatronSequenceParallel` if weights are sharded, too.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        layers: range,
        providers: StageProviders,
        input_every: int = 1,
        recomputes_windows: bool = False,
        exchange: UlyssesAllToAll | MegatronSequenceParallel | None = None,
    ) -> None:
        self._tensor = exchange if isinstance(exchange, MegatronSequenceParallel) else None
        self._heads = exchange if isinstance(exchange, UlyssesAllToAll) else None
        self.model = model if self._tensor is None else self._tensor.sharding.own_model
        self._layers, self._providers = layers, providers
        trainable = providers.trainable
        self._with_backward = layers_with_backward(model, trainable, layers=layers)
        below = layers_with_backward(model, trainable, layers=range(layers.start))
        self._trains_below = len(below) > 0 or trains_embedding(model, trainable)
        self._adapter_scale = 1.0 if trainable.adapter is None else trainable.adapter.scale
        self.store, self._kv = providers.saved, providers.kv_store
        self._blocks = BlockLayout(
            self.model,
            layers=self._with_backward,
            element_bytes=self._kv.dtype.itemsize,
            input_every=input_every,
        )
        self.layout = ActivationLayout(self._blocks, {})
        """Layout of the saved tensors of the step given to :meth:`prepare`."""
        self._kv_placement: KVPlacement = "retained"
        self._recomputes_windows = recomputes_windows
        self._deferred: dict[UnitKey, list[tuple[int, DeferredGradients]]] = {}

    @cached_property
    def is_first(self) -> bool:
        """True if the stage holds the embedding."""
        return self._layers.start == 0

    @cached_property
    def is_last(self) -> bool:
        """True if the stage holds the final norm and the head."""
        return self._layers.stop == self.model.num_layers

    @cached_property
    def _trained_names(self) -> dict[int, frozenset[str]]:
        """Names within each layer with a backward of the parameters that train."""
        trainable = self._providers.trainable
        return {index: trainable.trained_names(self.model, index) for index in self._with_backward}

    def prepare(
        self,
        units: Mapping[UnitKey, Unit],
        *,
        placements: Mapping[UnitKey, SubsequencePlacement],
        sequences_in_flight: int = 1,
        kv_placement: KVPlacement = "retained",
    ) -> None:
        """Reserve memory for the tensors that ``units`` retain, before the first unit runs.

        Args:
            units: Units of one training step that this stage runs backward.
            placements: Rows of each unit to retain, offload and recompute, before sharding.
            sequences_in_flight: Number of consecutive sequences that hold saved tensors at once.
            kv_placement: Placement of K and V between forward and backward.

        Raises:
            MemoryError: The memory cannot be allocated.
        """
        if self._tensor is not None:
            check_whole_classes(placements.values())
        exchange = self._tensor or self._heads
        self._kv_placement = kv_placement
        self.layout = ActivationLayout(
            self._blocks,
            {key: placements[key].sharded(unit.shard_tokens) for key, unit in units.items()},
            rank=0 if exchange is None else exchange.rank,
            unsharded_token_placements=None if self._tensor is None else placements,
            sequences_in_flight=sequences_in_flight,
            kv_row_bytes=self._kv.row_bytes if kv_placement == "offloaded" else 0,
        )
        by_sequence: dict[int, int] = {}
        for unit in units.values():
            retained_bytes = self._retained_bytes(unit)
            by_sequence[unit.sequence] = by_sequence.get(unit.sequence, 0) + retained_bytes
        self.store.retained.reserve(max(by_sequence.values(), default=0) * sequences_in_flight)

    def visits(self, kind: ActionKind, unit: Unit) -> Iterator[WeightPart]:
        """Yield the weight parts that an action takes, in order.

        Call :meth:`prepare` first: the visits of backward depend on the step's layout.
        """
        if kind is ActionKind.F:
            if self.is_first:
                yield "embedding"
            yield from self._layers
            if self.is_last:
                yield "head"
        elif kind is ActionKind.KV:
            yield from self._blocks.kv_layers
        elif kind is ActionKind.B:
            yield from self._backward_visits(unit)

    def _backward_visits(self, unit: Unit) -> Iterator[int]:
        """Yield layers in backward order, each after the layers that recompute its input."""
        with_input = {i for i in self._with_backward if self.layout.saves_input(unit.key, i)}
        for index in reversed(self._with_backward):
            below = max(layer for layer in with_input if layer <= index)
            yield from range(below, index)
            with_input.update(range(below, index))
            yield index

    def forward(
        self, unit: Unit, x_CE: Tensor | None, *, loss_scale: float | None
    ) -> Tensor | None:
        """Run one unit forward.

        Args:
            unit: Unit to run; the first stage reads its tokens, the last stage its labels.
            x_CE: Output of the previous stage; None on the first stage.
            loss_scale: Factor of the summed loss; None runs forward only and saves nothing.

        Returns:
            Output ``[C, E]`` for the next stage; None on the last stage.
        """
        training = loss_scale is not None
        self._providers.begin(unit, self._layers, forward=True)
        x = self._providers.embed(unit) if x_CE is None else x_CE
        del x_CE  # otherwise it stays alive during all layers
        rotary = self._rotary(unit)
        for index in self._layers:
            saves = training and index in self._with_backward
            offloaded, retained = self.layout.tensor_rows(unit.key, index) if saves else ({}, {})
            with self._layer(unit, index, rotary, saves=saves, trains=training) as layer:
                x, saved = layer.forward(x, keep=frozenset(offloaded | retained))
            if saves:
                if "chosen" in saved:
                    self._providers.loads.add(unit, index, saved["chosen"])
                self.store.put(ActivationKey(*unit.key, index), **cut(saved, offloaded, retained))
            del saved  # otherwise tensors that are not saved stay alive during the next layer
        if unit.span.end == unit.span.length:
            kept = self._with_backward if training and self._kv_placement == "retained" else ()
            self._kv.release(unit.sequence, layers=[i for i in self._layers if i not in kept])
        if not self.is_last:
            return x
        self._providers.loss(unit, x, loss_scale)
        return None

    def backward(
        self, unit: Unit, dy_CE: Tensor | None, *, defer_weights: bool = False
    ) -> Tensor | None:
        """Run one unit backward.

        Args:
            unit: Unit given to :meth:`forward`; units of a sequence come in descending order.
            dy_CE: Gradient of the output; None on the last stage.
            defer_weights: Leave the products of weight gradients to :meth:`weight_gradients`.
                Their operands live until then, so saved tensors that a store lends are copied.

        Returns:
            Gradient of the input ``[C, E]``; None on the first stage with a backward.
        """
        self._providers.begin(unit, self._with_backward[::-1], forward=False)
        if unit.span.end == unit.span.length:
            self._providers.loads.complete(unit, self._with_backward)
        dx = self._providers.take_loss_gradient(unit) if dy_CE is None else dy_CE
        del dy_CE  # otherwise it stays alive during all layers
        rotary = self._rotary(unit)

        def take(key: ActivationKey) -> Saved:
            self.restore_kv()
            return join(*self.store.get(key, owned=defer_weights))

        taken: dict[int, Saved] = {}
        for index in reversed(self._with_backward):
            saved = taken.pop(index, None) or take(ActivationKey(*unit.key, index))
            if "x_in" not in saved:
                self._recompute_input(unit, index, saved, taken, take, rotary)
            with self._layer(unit, index, rotary) as layer:
                layer.recompute_missing_rows(saved)
                with self._sink(unit, index, deferred=defer_weights) as gradients:
                    dx = layer.backward(dx, saved=saved, gradients=gradients)
            self.store.free(ActivationKey(*unit.key, index))
        if unit.span.start == 0:
            self._kv.release(unit.sequence, layers=self._with_backward)
            self._providers.loads.release(unit, self._with_backward)
        if not self._trains_below:
            return None
        if not self.is_first:
            return dx
        self._providers.embed_backward(unit, dx)
        return None

    def restore_kv(self) -> None:
        """Restore the K and V, of any stage of the rank, whose blocks are the next to be used.

        Called before each layer's saved tensors are taken, and behind a backward.
        """
        while (key := self.store.next_kv) is not None:
            kv, _ = self.store.get(key)
            self._kv.restore(key.layer, key.sequence, kv["keys"], kv["values"])
            self.store.free(key)

    def recompute_kv(self, unit: Unit) -> None:
        """Recompute K and V of a unit from the layer inputs, which must all be on the device.

        Args:
            unit: Unit to recompute; units of a sequence come in ascending order, all before the
                sequence's first backward.
        """
        rotary = self._rotary(unit)
        for index in self._blocks.kv_layers:
            x = self.store.retained.peek(ActivationKey(*unit.key, index), "x_in")
            assert x is not None, f"layer {index} has not retained its input"
            assert x.shape[0] == unit.tokens_C.shape[0], f"layer {index} lacks rows of its input"
            with self._layer(unit, index, rotary) as layer:
                layer.recompute_kv(x)

    def weight_gradients(self, unit: Unit) -> None:
        """Compute the deferred weight gradients of a unit; once per unit."""
        for index, sink in reversed(self._deferred.pop(unit.key)):
            self.store.retained.held.add(-sink.operand_bytes)
            with self._providers.sink(unit, index) as sums:
                sink.add_up(sums)

    @contextmanager
    def _sink(self, unit: Unit, index: int, *, deferred: bool) -> Iterator[GradientSink]:
        """Yield the sink of the weight gradients of layer ``index``."""
        if not deferred:
            with self._providers.sink(unit, index) as sums:
                yield sums
            return
        sink = DeferredGradients(self._trained_names[index])
        yield sink
        self._deferred.setdefault(unit.key, []).append((index, sink))
        self.store.retained.held.add(sink.operand_bytes)

    def _recompute_input(
        self,
        unit: Unit,
        index: int,
        saved: Saved,
        taken: dict[int, Saved],
        take: Callable[[ActivationKey], Saved],
        rotary: RotaryTables,
    ) -> None:
        """Recompute the input x_in of layer ``index`` from the layer below and add it to ``saved``.

        With the saved attention output o, the layer below needs no attention: x_mid = x_in + o W_o,
        y = x_mid + MLP(x_mid), one product more per token than recomputing the layer itself. Saved
        tensors of layers below that ``take`` returns are put into ``taken`` until their backward.
        """
        below = index - 1
        if below not in taken:
            taken[below] = take(ActivationKey(*unit.key, below))
        if "x_in" not in taken[below]:
            self._recompute_input(unit, below, taken[below], taken, take, rotary)
        with self._layer(unit, below, rotary) as layer:
            layer.recompute_missing_rows(taken[below])
            saved["x_in"] = layer.recompute_output(taken[below])

    def assert_idle(self) -> None:
        """Assert that the step left nothing over: every saved tensor was used exactly once."""
        leftovers = {
            "activations": self.store.num_entries,
            "sequences in the KV store": self._kv.num_sequences,
            "sequences with states": self._providers.states.num_sequences,
            "weight gradients": len(self._deferred),
            "sequences with loads of experts": self._providers.loads.num_sequences,
        }
        assert not any(leftovers.values()), f"left over after the step: {leftovers}"

    def _retained_bytes(self, unit: Unit) -> int:
        """Return the bytes that forward of ``unit`` leaves in the store on the device."""
        head = stacked_bytes(
            (unit.tokens_C.shape[0], self.model.hidden_size), self._kv.dtype.itemsize
        )
        return self.layout.retained_bytes(unit.key) + (head if self.is_last else 0)

    def _rotary(self, unit: Unit) -> RotaryTables:
        positions = unit.positions_C if self._tensor is None else unit.span_positions_C
        return RotaryTables(self.model, positions, dtype=self._kv.dtype)

    @contextmanager
    def _layer(
        self,
        unit: Unit,
        index: int,
        rotary: RotaryTables,
        *,
        saves: bool = False,
        trains: bool = True,
    ) -> Iterator[Layer]:
        """Yield layer ``index`` for a unit; ``saves`` in a forward with a backward to come."""
        tokens = TokenExchange()
        if self._tensor is not None:
            both = self._tensor.gather, self._tensor.scatter_sum
            tokens = TokenExchange(*(partial(one, shard_tokens=unit.shard_tokens) for one in both))
        linear = self.model.linear_attention_of(self.model.layer_type(index))
        scale, routing = self._adapter_scale, self._providers.loads.terms(unit, index)
        with visit(self._providers.weights, index) as weights:
            mixer: Mixer
            if linear is None:
                attention = self._attention(unit, index, saves=saves, trains=trains)
                heads = Heads(self.model, weights, rotary.of_layer(index), scale)
                mixer = AttentionMixer(heads, attention)
            else:
                exchange = HeadExchange(linear, self._heads, unit.shard_tokens)
                states, key = self._providers.states, (index, unit.sequence)
                recurrence = StoredRecurrence(weights, exchange, states, key, unit.span, saves)
                mixer = LinearMixer(self.model, weights, recurrence)
            yield Layer(self.model, weights, mixer, tokens, scale, routing)

    def _attention(self, unit: Unit, index: int, *, saves: bool, trains: bool) -> PrefixAttention:
        """Return the attention of a unit in layer ``index``; offload K and V if they are saved."""
        window, offload = self.model.layer_type(index).window, None
        recomputes = self._recomputes_windows and self._kv_placement == "retained"
        if saves and self._kv_placement == "offloaded":
            offload = partial(self.store.put, ActivationKey(*unit.key, index, is_kv=True))
        unsaved = unit.shard_tokens  # of each rank the last ones
        if unit.key in self.layout.shards:
            unsaved = self.layout.unsaved_attention_tokens(unit.key)
        partial_kv = window is not None and (recomputes or not trains)
        return PrefixAttention(
            self._providers.kv(unit, index, partial=partial_kv),
            unit.runs,
            unsaved,
            self._heads,
            window=window,
            document_starts=unit.span.document_starts,
            scale=self.model.attention_scale,
            offload=offload,
        )
