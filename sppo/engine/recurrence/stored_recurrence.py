"""Linear attention of one unit, from the state that the units before it have left.

The state is that of the document which the unit continues. A unit that begins a document starts
from nothing, and so does each document that begins within the unit.

Legend: C tokens of the unit, H value heads, D size of a value, M channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sppo.config.model import LinearAttention
from sppo.engine.recurrence.state_store import SequenceStates
from sppo.engine.unit import TokenSpan
from sppo.model.gradients import GradientSink
from sppo.model.layer import Weights
from sppo.model.recurrence import Recurrence, State


@dataclass(frozen=True, slots=True)
class StoredRecurrence:
    """:class:`sppo.model.linear_mixer.SubsequenceRecurrence` of all tokens of a unit.

    Attributes:
        linear: Heads, all of the layer or some of them.
        states: States of the heads in the layer, between the units of the sequence.
        span: Positions of the unit.
        for_backward: Whether the unit will run backward.
    """

    linear: LinearAttention
    states: SequenceStates
    span: TokenSpan
    for_backward: bool

    def forward(self, qkv_CM: Tensor, ab_C2H: Tensor, weights: Weights) -> Tensor:
        """Return the output ``[C, H, D]``; keep the state behind the unit."""
        o, state = self._recurrence(qkv_CM, ab_C2H, weights).forward(self._state)
        self.states.leave(self.span, state, for_backward=self.for_backward)
        return o

    def recompute(self, qkv_CM: Tensor, ab_C2H: Tensor, weights: Weights) -> Tensor:
        """Return the output ``[C, H, D]`` again, of a unit that has not run backward."""
        return self._recurrence(qkv_CM, ab_C2H, weights).forward(self._state)[0]

    def backward(
        self,
        do_CHD: Tensor,
        qkv_CM: Tensor,
        ab_C2H: Tensor,
        weights: Weights,
        gradients: GradientSink,
    ) -> tuple[Tensor, Tensor]:
        """Return (dqkv_CM, dab_C2H) in new memory; hand on the gradient of the state."""
        dqkv, dab, dweights = self.gradients(do_CHD, qkv_CM, ab_C2H, weights)
        for name, gradient in dweights.items():
            if gradients.trains(name):
                gradients.add(name, gradient)
        return dqkv, dab

    def gradients(
        self, do_CHD: Tensor, qkv_CM: Tensor, ab_C2H: Tensor, weights: Weights
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return (dqkv_CM, dab_C2H, gradients of the weights by name); hand on the state's."""
        state, behind = self._state, self.states.gradient_behind(self.span)
        recurrence = self._recurrence(qkv_CM, ab_C2H, weights)
        dqkv, dab, dweights, dstate = recurrence.backward(do_CHD, behind, state)
        self.states.hand_back(self.span, None if state is None else dstate)
        return dqkv, dab, dweights

    def _recurrence(self, qkv_CM: Tensor, ab_C2H: Tensor, weights: Weights) -> Recurrence:
        return Recurrence(weights, self.linear, qkv_CM, ab_C2H, self._starts)

    @property
    def _state(self) -> State | None:
        """State before the unit; None if the unit begins a document."""
        return (
            None if self.span.start in self.span.document_starts else self.states.before(self.span)
        )

    @property
    def _starts(self) -> tuple[int, ...]:
        """Rows of the unit with which documents begin, but for the first row."""
        start, end = self.span.start, self.span.end
        return tuple(s - start for s in self.span.document_starts if start < s < end)
