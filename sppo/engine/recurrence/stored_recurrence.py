"""Linear attention of one unit, from the state that the unit before it has left.

The state is that of the document which the unit continues. A unit that begins a document starts
from zeros, and so does each document that begins within the unit.

Legend: C tokens of the unit on this rank, H value heads, D size of a value, I width of the inputs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from torch import Tensor

from sppo.engine.recurrence.head_exchange import HeadExchange
from sppo.engine.recurrence.state_store import Key, StateStore
from sppo.engine.unit import TokenSpan
from sppo.model.gradients import GradientSink
from sppo.model.layer import Weights
from sppo.model.recurrence import Recurrence, State


@dataclass(frozen=True, slots=True)
class StoredRecurrence:
    """:class:`sppo.model.linear_mixer.SubsequenceRecurrence` of this rank's tokens of a unit.

    Attributes:
        weights: Weights of the layer, by name within it.
        heads: Heads of this rank, and their exchange for tokens.
        store: Store of the states of these heads.
        key: Layer and sequence.
        span: Positions of the unit.
        saves: Whether this is a forward with a backward to come.
    """

    weights: Weights
    heads: HeadExchange
    store: StateStore
    key: Key
    span: TokenSpan
    saves: bool

    def forward(self, inputs_CI: Tensor) -> Tensor:
        """Return the output ``[C, H, D]``; keep the state behind the unit."""
        o, state = self._recur(inputs_CI)
        self.store.leave(self.key, self.span, state, saves=self.saves)
        return o

    def recompute(self, inputs_CI: Tensor) -> Tensor:
        """Return the output ``[C, H, D]`` again, of a unit that has not run backward."""
        return self._recur(inputs_CI)[0]

    def backward(self, do_CHD: Tensor, inputs_CI: Tensor, gradients: GradientSink) -> Tensor:
        """Return dinputs_CI in new memory; hand on the gradient of the state."""
        inputs_CI, do_CHD = self.heads.to_heads(inputs_CI, do_CHD)
        state, behind = self._state, self.store.gradient_behind(self.key)
        recurrence = self._recurrence(inputs_CI)
        dinputs, dweights, dstate = recurrence.backward(do_CHD, behind, state)
        self.store.hand_back(self.key, self.span, None if state is None else dstate)
        for name, gradient in dweights.items():
            if gradients.trains(name):
                gradients.add(name, self.heads.whole(gradient, self.weights[name]))
        return self.heads.to_tokens(dinputs)

    def _recur(self, inputs_CI: Tensor) -> tuple[Tensor, State]:
        """Return the output of this rank's tokens, and the state of its heads behind the unit."""
        (inputs_CI,) = self.heads.to_heads(inputs_CI)
        o, state = self._recurrence(inputs_CI).forward(self._state)
        return self.heads.outputs_to_tokens(o), state

    def _recurrence(self, inputs_CI: Tensor) -> Recurrence:
        """Return the recurrence of this rank's heads over all tokens."""
        own = self.heads.own_weights(self.weights)
        return Recurrence(own, self.heads.own, inputs_CI, self._starts)

    @property
    def _state(self) -> State | None:
        """State before the unit; None if the unit begins a document."""
        begins = self.span.start in self.span.document_starts
        return None if begins else self.store.before(self.key, self.span)

    @property
    def _starts(self) -> tuple[int, ...]:
        """Tokens of the unit with which documents begin, but for its first token."""
        start, starts = self.span.start, self.span.document_starts
        inside = starts[bisect_right(starts, start) : bisect_left(starts, self.span.end)]
        return tuple(s - start for s in inside)
