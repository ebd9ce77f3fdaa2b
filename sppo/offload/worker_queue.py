"""In-order queues of host work, each served by one thread.

Work waits for the events it depends on and then runs; its future is an event for later work. If one
of the events failed, the work fails with it, so nothing ever runs on wrong data.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

from sppo.offload.queues import Event

_CANCELLED = "left out: the step failed"


class WorkerQueue:
    """One thread that does work in the order in which another thread submits it.

    An interpreter that exits first finishes what was submitted and not cancelled.

    Args:
        name: prefix of the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._not_begun: deque[tuple[Callable[[], None], Sequence[Event]]] = deque()
        """Work and the events it depends on. Futures know neither, so both are free once the work
        is done."""
        self._last: Future[None] | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        """Guards what both threads write: the first error and the busy seconds."""
        self._error: BaseException | None = None
        self._busy_s = 0.0

    def submit(self, work: Callable[[], None], *, after: Sequence[Event] = ()) -> Future[None]:
        """Enqueue ``work``, to run once the work before it is done and ``after`` is reached.

        Returns:
            The end of the work. Its error is raised by :func:`wait_for`; a
            :class:`concurrent.futures.CancelledError` means that the work was left out.
        """
        self._not_begun.append((work, after))
        self._last = self._executor.submit(self._run_next)
        return self._last

    def check(self) -> None:
        """Raise the first error since the last :meth:`wait_all`, if there was one."""
        error = self._error
        if error is not None:
            raise _copied(error)

    def cancel(self) -> None:
        """Leave out all work that has not begun, until :meth:`wait_all`."""
        self._cancelled = True

    def wait_all(self) -> None:
        """Wait until all work has ended; then forget errors and accept work again."""
        if self._last is not None:
            wait([self._last])
        self._last = None
        with self._lock:
            self._error = None
        self._cancelled = False

    def take_busy_s(self) -> float:
        """Return the seconds of work since the last call, without the waits for events."""
        with self._lock:
            busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def close(self) -> None:
        """Leave out all work that has not begun, and end the thread."""
        self.cancel()
        self._executor.shutdown()

    def _run_next(self) -> None:
        """Run the first work that has not begun; for the thread.

        The error is recorded before the future is done: who waits for that may call
        :meth:`wait_all`, and an error recorded later would be found by the next step.
        """
        try:
            self._run(*self._not_begun.popleft())
        except BaseException as error:
            with self._lock:
                if self._error is None:
                    self._error = error
            error.__traceback__ = None  # frames would keep tensors alive
            raise

    def _run(self, work: Callable[[], None], after: Sequence[Event]) -> None:
        for event in after:
            wait_for(event)
        if self._cancelled:
            raise CancelledError(_CANCELLED)
        start = time.perf_counter()
        work()
        with self._lock:
            self._busy_s += time.perf_counter() - start


def close_queues(queues: Collection[WorkerQueue]) -> None:
    """Close several queues whose work may wait for one another."""
    for queue in queues:
        queue.cancel()
    for queue in queues:
        queue.close()


def wait_for(event: Event) -> None:
    """Wait until ``event`` is reached.

    Raises:
        OSError: a disk failed on the way.
        CancelledError: the work was left out.
    """
    error = event.exception()
    if error is not None:
        raise _copied(error)


def _copied(error: BaseException) -> BaseException:
    """Return a copy of a queue's error for another thread.

    The original would collect the frames of every thread that raises it, and keep their tensors.
    """
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    if isinstance(error, CancelledError):
        return CancelledError(_CANCELLED)
    return error
