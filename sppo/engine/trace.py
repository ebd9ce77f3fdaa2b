"""Times of the actions of a step, read once the device has finished the step.

On a CPU, an action is complete when its handler returns, and the host's clock gives the time. On a
GPU, the host only enqueues work into a stream: events are recorded before and after each action and
read after the step, so that the step never waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sppo.schedule.actions import Action, ActionKind

_cuda: Any = torch.cuda  # parts of torch.cuda are untyped


@dataclass(frozen=True, slots=True)
class ExecutedAction:
    """Action with its start and finish, in seconds of the host's clock."""

    action: Action
    start_s: float
    finish_s: float


class Stopwatch:
    """Clock of compute: sets marks between compute and reads their times later.

    This one is of a device that completes work as it is issued.
    """

    def mark(self) -> Any:
        """Return a mark after all compute issued so far, without waiting."""
        return time.perf_counter()

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Return the time at which compute reached each mark, in seconds of the host's clock."""
        return list(marks)


class CudaStopwatch(Stopwatch):
    """:class:`Stopwatch` of a CUDA device, made of events in the compute stream.

    Args:
        device: Device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Record an event in the current stream and return it."""
        event = _cuda.Event(enable_timing=True)
        event.record(_cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Return the times in seconds of the host's clock; waits for all compute issued so far.

        Both clocks are read once when compute is done, which gives their offset.
        """
        now = self.mark()
        now.synchronize()
        now_s = time.perf_counter()
        return [now_s - mark.elapsed_time(now) / 1e3 for mark in marks]


class Trace:
    """Executed actions of a step, in order, with marks of their start and finish.

    Args:
        stopwatch: Clock that made the marks and reads them.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._marks: list[tuple[Action, Any, Any]] = []
        self._read: tuple[ExecutedAction, ...] | None = None

    def add(self, action: Action, start: Any, finish: Any) -> None:
        """Add an action that ran between two marks of the stopwatch; not after times were read."""
        assert self._read is None, "a trace that was read is over"
        self._marks.append((action, start, finish))

    @property
    def marks(self) -> list[Any]:
        """Start and finish marks of all actions, in order; empty after the trace was read."""
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
        """Return the total time of all actions of the given kinds."""
        return sum(
            done.finish_s - done.start_s for done in self.actions() if done.action.kind in kinds
        )
