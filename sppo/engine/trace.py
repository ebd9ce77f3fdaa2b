"""Times of the actions of a step, read once the device has finished the step.

On a CPU an action has run when its handler returns, and the host's clock says when. On a GPU the
host only puts work into a stream and goes on; there two events stand around each action, and they
are read after the step, so nothing waits for them while it runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sppo.schedule.actions import Action, ActionKind

_cuda: Any = torch.cuda  # parts of it have no types


@dataclass(frozen=True, slots=True)
class ExecutedAction:
    """One action and when it ran, by the host's clock."""

    action: Action
    start_s: float
    finish_s: float


class Stopwatch(Protocol):
    """Takes the times at which compute begins and ends."""

    def mark(self) -> Any:
        """Return a mark behind all compute issued so far; never waits."""
        ...

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Return the time at which compute came to each of ``marks``; waits for the last."""
        ...


class HostStopwatch:
    """:class:`Stopwatch` of a device whose work is done when it is issued."""

    def mark(self) -> float:
        """Return the host's clock."""
        return time.perf_counter()

    def read(self, marks: Sequence[float]) -> list[float]:
        """Return the marks themselves: they are seconds already."""
        return list(marks)


class CudaStopwatch:
    """:class:`Stopwatch` of a CUDA device: events in the stream that compute goes to.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Record an event in the current stream and return it."""
        event = _cuda.Event(enable_timing=True)
        event.record(_cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Return seconds on the host's clock, compared with the device's now that all is done."""
        now = self.mark()
        now.synchronize()
        now_s = time.perf_counter()
        return [now_s - mark.elapsed_time(now) / 1e3 for mark in marks]


class Trace:
    """The executed actions, in order.

    Args:
        stopwatch: whose marks it holds.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._marks: list[tuple[Action, Any, Any]] = []
        self._read: tuple[ExecutedAction, ...] | None = None

    def add(self, action: Action, start: Any, finish: Any) -> None:
        """Add an action that ran between two marks of the stopwatch."""
        assert self._read is None, "a trace that was read is over"
        self._marks.append((action, start, finish))

    @property
    def marks(self) -> list[Any]:
        """Marks of the stopwatch that compute comes to, in order, until the trace is read."""
        return [mark for _, *marks in self._marks for mark in marks]

    def actions(self) -> tuple[ExecutedAction, ...]:
        """Return all actions with their times; the first call waits for the device."""
        if self._read is None:
            points = self.marks
            times = iter(self._stopwatch.read(points) if points else ())
            self._read = tuple(
                ExecutedAction(action, next(times), next(times)) for action, _, _ in self._marks
            )
            self._marks.clear()
        return self._read

    def seconds(self, *kinds: ActionKind) -> float:
        """Time of the actions of some kinds."""
        return sum(
            done.finish_s - done.start_s for done in self.actions() if done.action.kind in kinds
        )
