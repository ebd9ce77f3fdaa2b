"""Layers of a stage for one unit in one pass: each with its weights and its token mixer.

What the mixer reads of earlier units is in stores of the rank: keys and values, or the state of
linear attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

from sppo.activations.activation_layout import ActivationKey
from sppo.config.model import LinearAttention, ModelConfig
from sppo.engine.attention.prefix_attention import PrefixAttention
from sppo.engine.providers.weights import visit
from sppo.engine.recurrence.stored_recurrence import StoredRecurrence
from sppo.engine.recurrence.ulysses_recurrence import UlyssesRecurrence
from sppo.engine.stage_providers import StageProviders
from sppo.engine.unit import Unit
from sppo.model.attention_mixer import AttentionMixer
from sppo.model.layer import Layer
from sppo.model.linear_mixer import LinearMixer, SubsequenceRecurrence
from sppo.model.mixer import Mixer
from sppo.model.residual import TokenExchange
from sppo.model.rope import RotaryTables
from sppo.parallel.megatron import MegatronSequenceParallel
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass(frozen=True)
class UnitLayers:
    """Layers of a stage for one unit in one pass.

    Attributes:
        model: Shape of the model; with Megatron, that of this rank's shard.
        providers: Weights, and the stores of the rank.
        exchange: Communication with the ranks over which the unit's tokens are sharded.
        unit: Unit that runs.
        unsaved_tokens: Number of last tokens on each rank whose attention output is not saved.
        keeps_windows: Whether layers with a window keep K and V of all tokens.
        offloads_kv: Whether K and V leave the device between forward and backward.
    """

    model: ModelConfig
    providers: StageProviders
    exchange: UlyssesAllToAll | MegatronSequenceParallel | None
    unit: Unit
    unsaved_tokens: tuple[int, ...]
    keeps_windows: bool
    offloads_kv: bool

    @contextmanager
    def layer(self, index: int, *, saves: bool = False) -> Iterator[Layer]:
        """Yield layer ``index`` with its weights.

        Args:
            index: Index of the layer in the model.
            saves: Whether this is a forward with a backward to come.
        """
        adapter, tokens = self.providers.trainable.adapter, TokenExchange()
        scale = 1.0 if adapter is None else adapter.scale
        if isinstance(self.exchange, MegatronSequenceParallel):
            both = self.exchange.gather, self.exchange.scatter_sum
            shards = self.unit.shard_tokens
            tokens = TokenExchange(*(partial(one, shard_tokens=shards) for one in both))
        linear = self.model.linear_attention_of(self.model.layer_type(index))
        with visit(self.providers.weights, index) as weights:
            mixer: Mixer
            if linear is not None:
                recurrence = self._recurrence(linear, index, saves=saves)
                mixer = LinearMixer(self.model, weights, recurrence)
            else:
                attention, rotary = (
                    self._attention(index, saves=saves),
                    self._rotary.of_layer(index),
                )
                mixer = AttentionMixer(self.model, weights, rotary, attention, scale)
            routing = self.providers.loads.terms(self.unit, index)
            yield Layer(self.model, weights, mixer, tokens, scale, routing)

    def _attention(self, index: int, *, saves: bool) -> PrefixAttention:
        """Return the attention of the unit in a layer, over the K and V of the rank's store."""
        window, offload = self.model.layer_type(index).window, None
        if saves and self.offloads_kv:
            key = ActivationKey(*self.unit.key, index, is_kv=True)
            offload = partial(self.providers.saved.put, key)
        return PrefixAttention(
            self.providers.kv(
                self.unit, index, partial=window is not None and not self.keeps_windows
            ),
            self.unit.runs,
            self.unsaved_tokens,
            self._heads,
            window=window,
            document_starts=self.unit.span.document_starts,
            scale=self.model.attention_scale,
            offload=offload,
        )

    def _recurrence(
        self, linear: LinearAttention, index: int, *, saves: bool
    ) -> SubsequenceRecurrence:
        """Return the recurrence of the unit in a layer, from the state in the rank's store."""
        unit, heads = self.unit, self._heads
        own = linear if heads is None else linear.of_rank(heads.degree)
        states = self.providers.states.of(index, unit.sequence)
        recurrence = StoredRecurrence(own, states, unit.span, saves)
        if heads is None:
            return recurrence
        heads = heads.of_heads(linear.value_heads, linear.key_heads)
        return UlyssesRecurrence(linear, recurrence, heads, unit.shard_tokens)

    @cached_property
    def _rotary(self) -> RotaryTables:
        """Angles of the tokens, of all of the unit's if weights are sharded."""
        is_whole = isinstance(self.exchange, MegatronSequenceParallel)
        positions = self.unit.span_positions_C if is_whole else self.unit.positions_C
        return RotaryTables(self.model, positions, dtype=self.providers.kv_store.dtype)

    @property
    def _heads(self) -> UlyssesAllToAll | None:
        """All-to-all of tokens and heads; None if this rank has all tokens of its heads."""
        return self.exchange if isinstance(self.exchange, UlyssesAllToAll) else None
