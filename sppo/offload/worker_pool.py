"""Threads that run host work which waits for events.

Work waits for the events it depends on and then runs; its future is an event for later work. If an
event failed, the dependent work fails, too, so work never runs on wrong data.

Futures are those of `concurrent.futures`, but its executor is not used: a signal handler may raise
anywhere in ``ThreadPoolExecutor.submit``, which then keeps its locks, and closing it would
deadlock. Here work is enqueued by a single call into C.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from queue import SimpleQueue
from typing import Protocol

THREADS = 4
"""Threads of a pool: pieces that a disk serves at once."""
_CANCELLED = "left out: the step failed"


class Event(Protocol):
    """Point in the copies, or in compute, that is reached once; futures are events."""

    def done(self) -> bool:
        """Return, without waiting, whether the event has been reached."""
        ...

    def exception(self) -> BaseException | None:
        """Wait for the event; return the error of its work, None if there was none."""
        ...


class WorkerPool:
    """Threads that run work in turn; the work given to one thread runs in order.

    The threads live until the pool is closed; the interpreter does not wait for them at exit.

    Args:
        name: Name of the threads.
        threads: Number of threads.
        begin: Function that every thread calls first; None for none.
    """

    def __init__(
        self, name: str, *, threads: int = THREADS, begin: Callable[[], None] | None = None
    ) -> None:
        self._closed = False
        self._error: BaseException | None = None
        self._queues: list[_Queue] = [SimpleQueue() for _ in range(threads)]
        self._turns = cycle(self._queues)
        # Thread.join is not safe in code that signal handlers may interrupt.
        self._ends: list[Future[None]] = [Future() for _ in range(threads)]
        for index, (queue, end) in enumerate(zip(self._queues, self._ends, strict=True)):
            serve = partial(self._serve, queue, end)
            threading.Thread(target=serve, name=f"{name} {index}", daemon=True).start()
        self._process = os.getpid()
        if begin is not None:
            for queue in self._queues:
                queue.put((_Work(), begin))

    def submit(self, *pieces: Callable[[], None], after: Sequence[Event] = ()) -> Future[None]:
        """Give each of ``pieces`` to the next thread, to run after its earlier work and ``after``.

        Once a piece has failed, those that have not started do nothing.

        Returns:
            Future of all pieces, reached when the last one has ended. :func:`wait_for` raises the
            first error; a :class:`concurrent.futures.CancelledError` means that work was skipped.

        Raises:
            OSError: A disk failed in earlier work.
            RuntimeError: The pool is closed, or belongs to the process that forked this one.
        """
        if self._closed or self._process != os.getpid():  # forks do not inherit threads
            raise RuntimeError("the pool has no threads any more")
        if self._error is not None:
            raise _copied(self._error)
        assert pieces, "nobody would end the future"
        work = _Work(after, len(pieces))
        for piece in pieces:
            next(self._turns).put((work, piece))
        return work.future

    def close(self, *, limit_s: float | None = None) -> bool:
        """Skip all work that has not started, and end the threads; may be repeated.

        Args:
            limit_s: Longest wait in seconds; None for no limit.

        Returns:
            Whether all work has ended. If not, work that has not started is still skipped.
        """
        self._closed = True
        for queue in self._queues:
            queue.put(None)
        return self._process != os.getpid() or not wait(self._ends, timeout=limit_s).not_done

    def _serve(self, queue: _Queue, end: Future[None]) -> None:
        """Run the work of a queue until the pool is closed; the body of a thread.

        References to work and events are dropped before the future is done, and the future has
        none.
        """
        while (entry := queue.get()) is not None:
            work, piece = entry
            self._run(work, piece)
            del entry, piece
            is_last = next(work.ended) == work.pieces
            future, error = work.future, work.error  # if this was the last: of all pieces
            del work
            if is_last and error is None:
                future.set_result(None)
            elif is_last:
                future.set_exception(error)
            del future, error  # otherwise kept alive until the next work is submitted
        end.set_result(None)

    def _run(self, work: _Work, piece: Callable[[], None]) -> None:
        """Run a piece in a thread, and record its error before the future is done."""
        try:
            for event in work.after:
                wait_for(event)
            if self._closed:
                raise CancelledError(_CANCELLED)
            if work.error is None:
                piece()
        except BaseException as error:
            # Drop frames, also those of chained errors, because they keep tensors alive.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self._error = self._error or error
            work.error = work.error or error


@dataclass(slots=True)
class _Work:
    """Pieces of work that end together."""

    after: Sequence[Event] = ()
    pieces: int = 1
    future: Future[None] = field(default_factory=Future)
    error: BaseException | None = None
    ended: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers the pieces as they end; counting is a single call into C, so no lock is needed."""


_Queue = SimpleQueue[tuple[_Work, Callable[[], None]] | None]


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


def _copied(error: BaseException) -> BaseException:
    """Return a copy of a thread's error to raise in another thread.

    The original would accumulate the frames of every thread that raises it, and keep their tensors
    alive. Errors of other types than OSError and CancelledError are not copied.
    """
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    if isinstance(error, CancelledError):
        return CancelledError(_CANCELLED)
    return error
