"""Linear attention of one unit, from the state that the unit before it has left.

The state is that of the document which the unit continues. A unit that begins a document starts
from zeros, and so does each document that begins within the unit.

Legend: C tokens of the unit on this rank, H value heads, D size of a value, M channels of the
convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sppo.config.model import LinearAttention
from sppo.engine.recurrence.head_exchange import HeadExchange
from sppo.engine.recurrence.state_store import Key, StateStore
from sppo.engine.unit import TokenSpan, Unit
from sppo.model.gradients import GradientSink
from sppo.model.layer import Weights
from sppo.model.recurrence import Recurrence, State
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass(frozen=True, slots=True)
class StoredRecurrence:
    """:class:`sppo.model.linear_mixer.SubsequenceRecurrence` of this rank's tokens of a unit.

    Attributes:
        linear: Heads of this rank.
        store: Store of the states of these heads.
        key: Layer and sequence.
        span: Positions of the unit.
        saves: Whether this is a forward with a backward to come.
        exchange: Exchange with the ranks over which tokens are sharded; None if this rank has all.
    """

    linear: LinearAttention
    store: StateStore
    key: Key
    span: TokenSpan
    saves: bool
    exchange: HeadExchange | None

    def forward(self, qkv_CM: Tensor, ab_C2H: Tensor, weights: Weights) -> Tensor:
        """Return the output ``[C, H, D]``; keep the state behind the unit."""
        o, state = self._recur(qkv_CM, ab_C2H, weights)
        self.store.leave(self.key, self.span, state, saves=self.saves)
        return o

    def recompute(self, qkv_CM: Tensor, ab_C2H: Tensor, weights: Weights) -> Tensor:
        """Return the output ``[C, H, D]`` again, of a unit that has not run backward."""
        return self._recur(qkv_CM, ab_C2H, weights)[0]

    def backward(
        self,
        do_CHD: Tensor,
        qkv_CM: Tensor,
        ab_C2H: Tensor,
        weights: Weights,
        gradients: GradientSink,
    ) -> tuple[Tensor, Tensor]:
        """Return (dqkv_CM, dab_C2H) in new memory; hand on the gradient of the state."""
        own, exchange = weights, self.exchange
        if exchange is not None:
            qkv_CM, ab_C2H, do_CHD = exchange.to_heads(qkv_CM, ab_C2H, do_CHD)
            own = exchange.own_rows(weights)
        state, behind = self._state, self.store.gradient_behind(self.key)
        recurrence = Recurrence(own, self.linear, qkv_CM, ab_C2H, self._starts)
        dqkv, dab, dweights, dstate = recurrence.backward(do_CHD, behind, state)
        self.store.hand_back(self.key, self.span, None if state is None else dstate)
        for name, gradient in dweights.items():
            if exchange is not None:
                gradient = exchange.whole(name, gradient, weights[name])
            if gradients.trains(name):
                gradients.add(name, gradient)
        return (dqkv, dab) if exchange is None else exchange.to_tokens(dqkv, dab)

    def _recur(self, qkv_CM: Tensor, ab_C2H: Tensor, weights: Weights) -> tuple[Tensor, State]:
        """Return the output of this rank's tokens, and the state of its heads behind the unit."""
        if self.exchange is not None:
            qkv_CM, ab_C2H = self.exchange.to_heads(qkv_CM, ab_C2H)
            weights = self.exchange.own_rows(weights)
        recurrence = Recurrence(weights, self.linear, qkv_CM, ab_C2H, self._starts)
        o, state = recurrence.forward(self._state)
        return (o if self.exchange is None else self.exchange.outputs_to_tokens(o)), state

    @property
    def _state(self) -> State | None:
        """State before the unit; None if the unit begins a document."""
        begins = self.span.start in self.span.document_starts
        return None if begins else self.store.before(self.key, self.span)

    @property
    def _starts(self) -> tuple[int, ...]:
        """Tokens of the unit with which documents begin, but for its first token."""
        start, end = self.span.start, self.span.end
        return tuple(s - start for s in self.span.document_starts if start < s < end)


def recurrence_of(
    unit: Unit,
    layer: int,
    linear: LinearAttention,
    *,
    store: StateStore,
    heads: UlyssesAllToAll | None,
    saves: bool,
) -> StoredRecurrence:
    """Return the recurrence of a unit in a layer; ``heads`` is the all-to-all of attention."""
    exchange = None
    if heads is not None:
        ranks = heads.of_heads(linear.value_heads, linear.key_heads)
        exchange = HeadExchange(linear, ranks, unit.shard_tokens)
        linear = exchange.own
    return StoredRecurrence(linear, store, (layer, unit.sequence), unit.span, saves, exchange)
