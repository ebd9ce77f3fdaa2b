"""Worker queues: in-order queues of host work, each served by one thread.

Work waits for the events it depends on and then runs; its future is an event for later work. If an
event failed, the dependent work fails, too, so work never runs on wrong data.

Futures are those of `concurrent.futures`, but its executor is not used: a signal handler may raise
anywhere in ``ThreadPoolExecutor.submit``, which then keeps its locks, and aborting the step would
deadlock. Here work is enqueued by a single call into C.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future, wait
from queue import SimpleQueue

from sppo.offload.queues.copy_queues import Event

_CANCELLED = "left out: the step failed"


class WorkerQueue:
    """Thread that runs work in the order in which another thread submits it.

    When the queue is garbage-collected, the thread ends after all submitted work. The interpreter
    does not wait for the thread at exit.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._cancelled = False
        self._lock = threading.Lock()
        """Guards the first error and the busy seconds, which both threads write."""
        self._error: BaseException | None = None
        self._busy_s = 0.0
        # Entries refer to their queue and the thread does not, so an idle queue can be collected.
        self._entries: SimpleQueue[
            tuple[Future[None], Callable[[], None], Sequence[Event], WorkerQueue] | None
        ] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._entries,), name=name, daemon=True
        )
        self._thread.start()
        # Thread.is_alive is not safe in code that signal handlers may interrupt.
        self._process: int | None = os.getpid()
        weakref.finalize(self, self._entries.put, None).atexit = False

    def submit(self, work: Callable[[], None], *, after: Sequence[Event] = ()) -> Future[None]:
        """Enqueue ``work``, to run after all earlier work and after the events ``after``.

        Returns:
            Future of the work. :func:`wait_for` raises its error; a
            :class:`concurrent.futures.CancelledError` means that the work was skipped.

        Raises:
            RuntimeError: The queue is closed, or belongs to the process that forked this one.
        """
        if not self._has_thread:
            raise RuntimeError(f"the queue {self._thread.name} has no thread any more")
        future: Future[None] = Future()
        self._entries.put((future, work, after, self))
        return future

    def check(self) -> None:
        """Raise the first error since the last :meth:`wait_all`, if any."""
        error = self._error
        if error is not None:
            raise _copied(error)

    def cancel(self) -> None:
        """Skip all work that has not started, until :meth:`wait_all`."""
        self._cancelled = True

    def wait_all(self, *, limit_s: float | None = None) -> bool:
        """Wait until all work has ended; then drop errors and stop skipping work.

        Args:
            limit_s: Longest wait in seconds; None for no limit.

        Returns:
            Whether all work has ended. If not, cancelled work is still skipped.
        """
        # Submit new work: a caller that was interrupted while submitting has no last future.
        if self._has_thread and wait([self.submit(_nothing)], timeout=limit_s).not_done:
            return False
        with self._lock:
            self._error = None
        self._cancelled = False
        return True

    def take_busy_s(self) -> float:
        """Return the seconds spent in work since the last call, without waits for events."""
        with self._lock:
            busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def close(self, *, waits: bool = True) -> None:
        """Skip all work that has not started, and end the thread.

        Args:
            waits: Whether to wait until the thread has ended.
        """
        self.cancel()
        self._process = None
        self._entries.put(None)
        if waits:
            self._thread.join()

    @property
    def _has_thread(self) -> bool:
        """True if the queue is open and belongs to this process: forks do not inherit threads."""
        return self._process == os.getpid()

    def _error_of(self, work: Callable[[], None], after: Sequence[Event]) -> BaseException | None:
        """Run work in the thread and return its error, None if there was none.

        The error is recorded before the future is done: the waiter may call :meth:`wait_all`, and
        an error recorded later would fail the next step.
        """
        try:
            for event in after:
                wait_for(event)
            if self._cancelled:
                raise CancelledError(_CANCELLED)
            start = time.perf_counter()
            work()
            with self._lock:
                self._busy_s += time.perf_counter() - start
        except BaseException as error:
            # Drop frames, also those of chained errors, because they keep tensors alive.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            with self._lock:
                if self._error is None:
                    self._error = error
            return error
        return None


def close_queues(queues: Collection[WorkerQueue], *, waits: bool = True) -> None:
    """Close queues whose work may wait for each other's; see :meth:`WorkerQueue.close`."""
    for queue in queues:
        queue.cancel()
    for queue in queues:
        queue.close(waits=waits)


def wait_for(event: Event) -> None:
    """Wait until ``event`` is reached.

    Raises:
        OSError: A disk failed in the work or in work that it depends on.
        CancelledError: The work was skipped.
    """
    error = event.exception()
    if error is not None:
        try:
            raise _copied(error)
        finally:
            del error  # breaks the reference cycle of frame and error


def _serve(
    entries: SimpleQueue[
        tuple[Future[None], Callable[[], None], Sequence[Event], WorkerQueue] | None
    ],
) -> None:
    """Run the work of a queue until it is dropped or closed; the body of its thread.

    References to work and events are dropped before the future is done, and the future has none.
    """
    while (entry := entries.get()) is not None:
        future, work, after, queue = entry
        error = queue._error_of(work, after)
        del entry, work, after, queue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        del future, error  # otherwise kept alive until the next work is submitted


def _nothing() -> None:
    """Do nothing, as work that only marks a point in the queue."""


def _copied(error: BaseException) -> BaseException:
    """Return a copy of a queue's error to raise in another thread.

    The original would accumulate the frames of every thread that raises it, and keep their tensors
    alive. Errors of other types than OSError and CancelledError are not copied.
    """
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    if isinstance(error, CancelledError):
        return CancelledError(_CANCELLED)
    return error
