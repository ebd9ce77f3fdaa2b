"""Store of the states of linear attention at the borders between the units of a sequence.

In each layer, a unit starts from the state that the units before it have left, and leaves one to
the next. Backward starts from the same states again, so each is kept until its unit has run
backward. Then the gradient of the state takes its place, until the unit before it runs backward.

Forward units of a sequence ascend without gaps, from 0 again once it was released, and backward
units descend from its end.
"""

from __future__ import annotations

from collections.abc import Iterable

from sppo.engine.unit import TokenSpan
from sppo.model.recurrence import State
from sppo.offload.retained import HeldBytes, on_its_own


class StateStore:
    """States, and gradients of them, of every layer of a rank and every sequence in flight.

    Args:
        held: Counter of the bytes of keys, values and states.
        poison: Overwrite what is freed with NaN, so that a late reader gets NaN.
    """

    def __init__(self, held: HeldBytes, *, poison: bool = False) -> None:
        self._held, self._poison = held, poison
        self._states: dict[tuple[int, int], SequenceStates] = {}

    def of(self, layer: int, sequence: int) -> SequenceStates:
        """Return the states of a sequence in a layer, none at first."""
        new = SequenceStates(self, f"layer {layer}, sequence {sequence}")
        return self._states.setdefault((layer, sequence), new)

    def release(self, sequence: int, *, layers: Iterable[int]) -> None:
        """Free what some layers have of a sequence, whose backward is complete or not needed."""
        for layer in layers:
            if (layer, sequence) in self._states:
                self._states.pop((layer, sequence)).free()

    def close(self) -> None:
        """Free all states, which no sequence may use any more."""
        self._states.clear()

    @property
    def num_sequences(self) -> int:
        """Number of sequences with states in the store."""
        return len({sequence for _, sequence in self._states})

    def keep(self, state: State) -> State:
        """Return a state in memory of its own, which is counted until :meth:`free`."""
        kept = State(*map(on_its_own, state))
        self._held.add(sum(part.nbytes for part in kept))
        return kept

    def free(self, state: State | None) -> None:
        """Count the memory of a state, if any, no longer; nobody may read it any more."""
        for part in state or ():
            self._held.add(-part.nbytes)
            if self._poison:
                part.fill_(float("nan"))


class SequenceStates:
    """States of one sequence in one layer, and the progress of its forward and backward.

    Args:
        store: Store that counts their bytes.
        name: Name of layer and sequence in errors.
    """

    def __init__(self, store: StateStore, name: str) -> None:
        self._store, self._name = store, name
        self._before: dict[int, State] = {}
        self._written, self._finished = 0, -1
        self._gradient: State | None = None

    def before(self, span: TokenSpan) -> State | None:
        """Return the state before a unit, lent until its backward; None before the first token."""
        return self._before[span.start] if span.start else None

    def leave(self, span: TokenSpan, state: State, *, for_backward: bool) -> None:
        """Keep the state behind a unit that has run forward, unless no unit follows.

        Args:
            span: Positions of the unit.
            state: State behind the unit.
            for_backward: Whether the unit will run backward, from the state before it, which is
                freed otherwise.
        """
        assert span.start == self._written, (
            f"{self._name}: forward at {span.start}, where {self._written} tokens have run"
        )
        self._written = self._finished = span.end
        if not for_backward:
            self._store.free(self._before.pop(span.start, None))
        if span.end < span.length:
            self._before[span.end] = self._store.keep(state)

    def gradient_behind(self, span: TokenSpan) -> State | None:
        """Return the gradient of the state behind a unit; None if no token depends on it."""
        assert span.end == self._finished, (
            f"{self._name}: backward of [{span.start}, {span.end}) but units down to "
            f"{self._finished} have run"
        )
        return self._gradient

    def hand_back(self, span: TokenSpan, gradient: State | None) -> None:
        """Keep the gradient of the state before a unit in place of the state; once per unit.

        Args:
            span: Positions of the unit, whose :meth:`gradient_behind` is freed.
            gradient: Gradient of the state before the unit; None if no token depends on it.
        """
        self._finished = span.start
        self._store.free(self._before.pop(span.start, None))
        self._store.free(self._gradient)
        self._gradient = None if gradient is None else self._store.keep(gradient)

    def free(self) -> None:
        """Free all states."""
        for state in (self._gradient, *self._before.values()):
            self._store.free(state)
