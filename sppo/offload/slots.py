"""A place that tensors pass through: FREE, being filled, FULL, being read, FREE again."""

from __future__ import annotations

from enum import Enum

from sppo.offload.queues import Dependency, Event, Ordering, Region


class SlotState(Enum):
    """Where a slot is in its round."""

    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    READING = "reading"


class Slot:
    """One region and the events of its round.

    Copies are enqueued long before they run, so the round is in what was enqueued: a slot may be
    given its next filling as soon as the end of its reading is an event, which comes before it.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self._filled: Event | None = None
        self._is_read = False
        self._emptied: Dependency | None = None

    @property
    def state(self) -> SlotState:
        """Where it is now, as far as events tell."""
        if self._filled is None:
            emptied = self._emptied is None or self._emptied[1].done
            return SlotState.FREE if emptied else SlotState.READING
        if self._is_read:
            return SlotState.READING
        return SlotState.FULL if self._filled.done else SlotState.FILLING

    @property
    def can_be_filled(self) -> bool:
        """Whether all that was put there is read, or its reading ends with an event."""
        return self._filled is None

    def before_filling(self) -> tuple[Dependency, ...]:
        """What comes before the next filling."""
        assert self.can_be_filled, f"{self} holds what nobody has read yet"
        return () if self._emptied is None else (self._emptied,)

    def fill(self, filled: Event) -> None:
        """FREE → filling, which ends with ``filled``."""
        assert self.can_be_filled, f"{self} holds what nobody has read yet"
        self._filled, self._is_read, self._emptied = filled, False, None

    def begin_reading(self) -> None:
        """FULL → reading."""
        assert self._filled is not None, f"{self} is read, and nothing is in it"
        self._is_read = True

    def end_reading(self, ordering: Ordering, read: Event) -> None:
        """Reading → FREE, once ``read`` is reached."""
        assert self._is_read, f"{self} is given back, and nobody reads it"
        self._filled, self._is_read, self._emptied = None, False, (ordering, read)

    def __str__(self) -> str:
        return f"slot {self.region.place} {self.region.index} ({self.state.value})"
