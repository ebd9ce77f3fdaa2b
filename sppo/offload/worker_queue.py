"""Queues of host work, each with a thread of its own: what comes first is done first.

An operation waits for the events it depends on, runs, and is then itself an event. If one of those
failed, it fails with it, and nothing that depends on it ever runs on wrong data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

_CANCELLED = "left out: the step failed"


class CancelledError(Exception):
    """The operation was left out because the step had failed."""


@runtime_checkable
class HostEvent(Protocol):
    """An event that host threads can wait for."""

    def wait(self) -> None:
        """Return when the event is reached.

        Raises:
            Exception: what went wrong on the way.
        """
        ...


class Reached:
    """An event that has been reached."""

    @property
    def done(self) -> bool:
        """Always True."""
        return True

    def wait(self) -> None:
        """Return immediately."""


class Operation:
    """One piece of work in a lane, and the event of its end."""

    def __init__(self, work: Callable[[], None], after: Sequence[HostEvent]) -> None:
        self._work: Callable[[], None] | None = work
        self._after: Sequence[HostEvent] = after
        self._ended = threading.Event()
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when the operation has ended.

        Raises:
            OSError: a disk failed.
            CancelledError: it was left out.
        """
        self._ended.wait()
        if self.error is not None:
            raise _again(self.error)

    def run(self, *, cancelled: Callable[[], bool]) -> float:
        """Do it, without the :meth:`end`; seconds of work, waiting not counted."""
        busy_s = 0.0
        try:
            for event in self._after:
                event.wait()
            if cancelled():
                raise CancelledError(_CANCELLED)
            start = time.perf_counter()
            assert self._work is not None, "an operation runs once"
            self._work()
            busy_s = time.perf_counter() - start
        except BaseException as error:
            self.error = error.with_traceback(None)  # frames would keep tensors alive
        # What it worked on is free before anyone hears that it has ended.
        self._work, self._after = None, ()
        return busy_s

    def end(self) -> None:
        """Let those know who wait for it."""
        self._ended.set()


class Lane:
    """A thread and its queue.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._last: Operation | None = None
        self._failed: BaseException | None = None
        self._cancelled = False
        self._busy_s = 0.0
        self._books = threading.Lock()
        """Lock of what both threads write: the first error and the seconds of work."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], None], *, after: Sequence[HostEvent]) -> Operation:
        """Enqueue ``work``; it runs after what is there already and after those events."""
        operation = Operation(work, after)
        self._last = operation
        self._queue.put(operation)
        return operation

    def check(self) -> None:
        """Raise the error of the first operation that failed, if one did."""
        failed = self._failed
        if failed is not None:
            raise _again(failed)

    def cancel(self) -> None:
        """Leave out from now on what has not begun."""
        self._cancelled = True

    def wait_all(self) -> None:
        """Wait for all there is; then forget errors and take work again."""
        if self._last is not None:
            self._last._ended.wait()
        self._last = None
        with self._books:
            self._failed = None
        self._cancelled = False

    def take_busy_s(self) -> float:
        """Seconds of work since the last call."""
        with self._books:
            busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def close(self) -> None:
        """Leave out what has not begun, and end the thread."""
        self._cancelled = True
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while True:
            operation = self._queue.get()
            if operation is None:
                return
            busy_s = operation.run(cancelled=lambda: self._cancelled)
            with self._books:
                self._busy_s += busy_s
                if self._failed is None:
                    self._failed = operation.error
            # Only now: whoever waits for it may settle the lane, and nothing may follow that.
            operation.end()
            del operation  # or it would stay, with its event, until the next one comes


def close_lanes(lanes: Iterable[Lane]) -> None:
    """End the threads of several lanes, which may wait for one another."""
    lanes = list(lanes)
    for lane in lanes:
        lane.cancel()
    for lane in lanes:
        lane.close()


def _again(error: BaseException) -> BaseException:
    """An error of a lane's thread for another thread, which adds its own traceback."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    if isinstance(error, CancelledError):
        return CancelledError(_CANCELLED)
    return error
