"""Worker queues: in-order queues of host work, each served by one thread.

Work waits for the events it depends on and then runs; its future is an event for later work. If one
of the events failed, the work fails with it, so nothing ever runs on wrong data.

The futures are those of `concurrent.futures`, its executor is not used: a signal handler may raise
anywhere in ``ThreadPoolExecutor.submit``, which then keeps its locks, and the step that is given up
waits for ever. Here work is enqueued by a single call of C.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future, wait
from queue import SimpleQueue

from sppo.offload.queues import Event

_CANCELLED = "left out: the step failed"


class WorkerQueue:
    """One thread that does work in the order in which another thread submits it.

    The thread ends with the queue, after the work that was submitted; an interpreter that exits
    does not wait for it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._cancelled = False
        self._lock = threading.Lock()
        """Guards what both threads write: the first error and the busy seconds."""
        self._error: BaseException | None = None
        self._busy_s = 0.0
        # Entries name their queue, not the thread: a queue without work may be dropped.
        self._entries: SimpleQueue[
            tuple[Future[None], Callable[[], None], Sequence[Event], WorkerQueue] | None
        ] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._entries,), name=name, daemon=True
        )
        self._thread.start()
        # Asking the thread whether it lives is no question for code that signals interrupt.
        self._process: int | None = os.getpid()
        weakref.finalize(self, self._entries.put, None).atexit = False

    def submit(self, work: Callable[[], None], *, after: Sequence[Event] = ()) -> Future[None]:
        """Enqueue ``work``, to run once the work before it is done and ``after`` is reached.

        Returns:
            The end of the work. Its error is raised by :func:`wait_for`; a
            :class:`concurrent.futures.CancelledError` means that the work was left out.

        Raises:
            RuntimeError: the queue is closed, or belongs to the process that forked this one.
        """
        if not self._has_thread:
            raise RuntimeError(f"the queue {self._thread.name} has no thread any more")
        future: Future[None] = Future()
        self._entries.put((future, work, after, self))
        return future

    def check(self) -> None:
        """Raise the first error since the last :meth:`wait_all`, if there was one."""
        error = self._error
        if error is not None:
            raise _copied(error)

    def cancel(self) -> None:
        """Leave out all work that has not begun, until :meth:`wait_all`."""
        self._cancelled = True

    def wait_all(self, *, limit_s: float | None = None) -> bool:
        """Wait until all work has ended; then forget errors and accept work again.

        Args:
            limit_s: longest wait; None waits as long as it takes.

        Returns:
            Whether all work has ended; if not, what is left is still left out when its turn comes.
        """
        # Not the last future: whoever was interrupted while submitting has not got it.
        if self._has_thread and wait([self.submit(_nothing)], timeout=limit_s).not_done:
            return False
        with self._lock:
            self._error = None
        self._cancelled = False
        return True

    def take_busy_s(self) -> float:
        """Return the seconds of work since the last call, without the waits for events."""
        with self._lock:
            busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def close(self, *, waits: bool = True) -> None:
        """Leave out all work that has not begun, and end the thread.

        Args:
            waits: until the thread has ended.
        """
        self.cancel()
        self._process = None
        self._entries.put(None)
        if waits:
            self._thread.join()

    @property
    def _has_thread(self) -> bool:
        """Return whether the queue is open, and of this process: a fork has none of its threads."""
        return self._process == os.getpid()

    def _error_of(self, work: Callable[[], None], after: Sequence[Event]) -> BaseException | None:
        """Do some work, for the thread; return its error.

        The error is recorded before the future is done: who waits for that may call
        :meth:`wait_all`, and an error recorded later would be found by the next step.
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
            # Frames would keep tensors alive, also those of an error that this one came from.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            with self._lock:
                if self._error is None:
                    self._error = error
            return error
        return None


def close_queues(queues: Collection[WorkerQueue], *, waits: bool = True) -> None:
    """Close several queues whose work may wait for one another; see :meth:`WorkerQueue.close`."""
    for queue in queues:
        queue.cancel()
    for queue in queues:
        queue.close(waits=waits)


def wait_for(event: Event) -> None:
    """Wait until ``event`` is reached.

    Raises:
        OSError: a disk failed on the way.
        CancelledError: the work was left out.
    """
    error = event.exception()
    if error is not None:
        try:
            raise _copied(error)
        finally:
            del error  # or frame and error would keep each other


def _serve(
    entries: SimpleQueue[
        tuple[Future[None], Callable[[], None], Sequence[Event], WorkerQueue] | None
    ],
) -> None:
    """Do the work of a queue until it is dropped or closed; the body of its thread.

    Futures know neither work nor events, and both are let go before anyone hears of the end.
    """
    while (entry := entries.get()) is not None:
        future, work, after, queue = entry
        error = queue._error_of(work, after)
        del entry, work, after, queue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        del future, error  # they would stay until the next work comes


def _nothing() -> None:
    """Work that is over at once."""


def _copied(error: BaseException) -> BaseException:
    """Return a copy of a queue's error for another thread.

    The original would collect the frames of every thread that raises it, and keep their tensors.
    """
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    if isinstance(error, CancelledError):
        return CancelledError(_CANCELLED)
    return error
