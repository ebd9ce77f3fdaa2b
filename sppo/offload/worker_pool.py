"""Threads that run host work which waits for events.

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
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from itertools import cycle
from queue import SimpleQueue

from sppo.offload.lane import Event

THREADS = 4
"""Threads of a pool: pieces that a disk serves at once."""
_CANCELLED = "left out: the step failed"


class WorkerPool:
    """Threads that share work; the work given to one thread runs in order.

    Args:
        name: Name of the threads.
        begin: Function that every thread calls first; None for none.
    """

    def __init__(self, name: str, *, begin: Callable[[], None] | None = None) -> None:
        self._workers = [Worker(f"{name} {index}") for index in range(THREADS)]
        self._turns = cycle(self._workers)
        for worker in self._workers:
            if begin is not None:
                worker.submit(begin)

    def submit(self, work: Callable[[], None], *, after: Sequence[Event] = ()) -> Future[None]:
        """Give ``work`` to the next thread, see :meth:`Worker.submit`."""
        return next(self._turns).submit(work, after=after)

    def check(self) -> None:
        """Raise the first error of each thread since the last :meth:`drain`, if any."""
        for worker in self._workers:
            worker.check()

    def drain(self, *, limit_s: float | None = None) -> bool:
        """Skip all work that has not started, wait for the other work, and drop errors.

        Args:
            limit_s: Longest wait in seconds; None for no limit.

        Returns:
            Whether all work has ended. If not, work that has not started is still skipped.
        """
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        for worker in self._workers:
            worker.cancel()
        ended = True
        for worker in self._workers:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ended = worker.wait_all(limit_s=left_s) and ended
        return ended

    def close(self, *, waits: bool = True) -> None:
        """Skip all work that has not started, and end the threads; may be repeated.

        Args:
            waits: Whether to wait until the threads have ended.
        """
        for worker in self._workers:
            worker.cancel()
        for worker in self._workers:
            worker.close(waits=waits)


class Worker:
    """Thread that runs work in the order in which another thread submits it.

    When the worker is garbage-collected, the thread ends after all submitted work. The interpreter
    does not wait for the thread at exit.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._cancelled = False
        self._error: BaseException | None = None
        # Entries refer to their worker and the thread does not, so that an idle worker can be
        # collected.
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
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
            RuntimeError: The worker is closed, or belongs to the process that forked this one.
        """
        if not self._has_thread:
            raise RuntimeError(f"the worker {self._thread.name} has no thread any more")
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
        self._error, self._cancelled = None, False
        return True

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
        """True if the worker is open and belongs to this process: forks do not inherit threads."""
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
            work()
        except BaseException as error:
            # Drop frames, also those of chained errors, because they keep tensors alive.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            if self._error is None:
                self._error = error
            return error
        return None


_Entry = tuple[Future[None], Callable[[], None], Sequence[Event], Worker]


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


def _serve(entries: SimpleQueue[_Entry | None]) -> None:
    """Run the work of a worker until it is dropped or closed; the body of its thread.

    References to work and events are dropped before the future is done, and the future has none.
    """
    while (entry := entries.get()) is not None:
        future, work, after, worker = entry
        error = worker._error_of(work, after)
        del entry, work, after, worker
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        del future, error  # otherwise kept alive until the next work is submitted


def _nothing() -> None:
    """Do nothing, as work that only marks a point in the queue."""


def _copied(error: BaseException) -> BaseException:
    """Return a copy of a worker's error to raise in another thread.

    The original would accumulate the frames of every thread that raises it, and keep their tensors
    alive. Errors of other types than OSError and CancelledError are not copied.
    """
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    if isinstance(error, CancelledError):
        return CancelledError(_CANCELLED)
    return error
