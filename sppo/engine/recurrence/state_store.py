"""Store of the states of linear attention at the borders between the units of a sequence.

In each layer, a unit starts from the state that the unit before it has left. Backward starts from
it again, so it is kept until its unit has run backward. Then the gradient of the state takes its
place, until the unit before has run backward.

Forward units of a sequence ascend without gaps, and backward units descend from its end.
"""

from __future__ import annotations

from sppo.engine.unit import TokenSpan
from sppo.model.recurrence import State
from sppo.offload.retained import HeldBytes, on_its_own

Key = tuple[int, int]
"""Layer of the model, and sequence of the step."""


class StateStore:
    """States, or their gradients, of every layer of a rank and every sequence in flight.

    Args:
        held: Counter of the bytes of keys, values and states.
        poison: Overwrite what is freed with NaN, so that a late reader gets NaN.
    """

    def __init__(self, held: HeldBytes, *, poison: bool = False) -> None:
        self._held, self._poison = held, poison
        self._reached: dict[Key, int] = {}
        self._states: dict[tuple[Key, int], State] = {}
        self._gradients: dict[Key, State] = {}

    def before(self, key: Key, span: TokenSpan) -> State | None:
        """Return the state before a unit, lent until its backward; None before the first token."""
        return self._states[key, span.start] if span.start else None

    def leave(self, key: Key, span: TokenSpan, state: State, *, saves: bool) -> None:
        """Keep the state behind a unit that has run forward, unless no unit follows.

        The state before the unit is freed, unless forward ``saves`` it for backward.
        """
        self._reach(key, span.start, span.end)
        if not saves:
            self._free(self._states.pop((key, span.start), None))
        if span.end < span.length:
            self._states[key, span.end] = self._kept(state)
        elif not saves:
            del self._reached[key]

    def gradient_behind(self, key: Key) -> State | None:
        """Return the gradient of the state behind the next unit of backward; None for zeros."""
        return self._gradients.get(key)

    def hand_back(self, key: Key, span: TokenSpan, gradient: State | None) -> None:
        """Keep the gradient of the state before a unit that has run backward, and free the state.

        The gradient is None if no token depends on the state.
        """
        self._reach(key, span.end, span.start)
        self._free(self._states.pop((key, span.start), None))
        self._free(self._gradients.pop(key, None))
        if gradient is not None:
            self._gradients[key] = self._kept(gradient)
        if span.start == 0:
            del self._reached[key]

    def close(self) -> None:
        """Free all states, which no sequence may use any more."""
        for kept in (self._reached, self._states, self._gradients):
            kept.clear()

    @property
    def num_sequences(self) -> int:
        """Number of sequences that have run in part."""
        return len({sequence for _, sequence in self._reached})

    def _reach(self, key: Key, begin: int, end: int) -> None:
        """Note that a unit has run from position ``begin`` to ``end``."""
        layer, sequence, reached = *key, self._reached.get(key, 0)
        assert begin == reached, (
            f"layer {layer}, sequence {sequence}: a unit from {begin} to {end} runs, where units "
            f"have run to {reached}"
        )
        self._reached[key] = end

    def _kept(self, state: State) -> State:
        """Return a state in memory of its own, and count it."""
        kept = State(*map(on_its_own, state))
        self._held.add(sum(part.nbytes for part in kept))
        return kept

    def _free(self, state: State | None) -> None:
        for part in state or ():
            self._held.add(-part.nbytes)
            if self._poison:
                part.fill_(float("nan"))
