"""Threads of which one runs at a time; a seed chooses the next thread whenever one waits.

A run is repeatable to the last operation, and threads that wait for each other are found at once
instead of after a timeout.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any


class Deadlock(RuntimeError):
    """Every thread waits for another one."""


class _GivenUp(BaseException):
    """Unwinds a thread because another one failed."""


class Turns:
    """Runs ``count`` threads in turns.

    Args:
        count: threads, numbered from 0.
        seed: of every choice.
    """

    def __init__(self, count: int, *, seed: int) -> None:
        self.random = random.Random(seed)
        self._count = count
        self._own = threading.local()
        self._may_run = [threading.Semaphore(0) for _ in range(count)]
        self._all_ended = threading.Event()
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._values: dict[int, Any] = {}
        self._error: BaseException | None = None

    @property
    def here(self) -> int:
        """Number of the calling thread."""
        return self._own.number

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What ``function(number)`` returns in each thread.

        Raises:
            Deadlock: every thread waits, with what each waits for.
            BaseException: the first that a thread raised, with its number as a note.
        """
        self._waiting = {number: (lambda: True, "its first turn") for number in range(self._count)}
        threads = [
            threading.Thread(target=self._thread, args=(number, function), daemon=True)
            for number in range(self._count)
        ]
        for thread in threads:
            thread.start()
        self._next()
        self._all_ended.wait()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [self._values[number] for number in range(self._count)]

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Return when ``ready()`` holds, having let other threads run where it does not yet."""
        if ready():
            return
        self._waiting[self.here] = (ready, what)
        self._next()
        self._sleep()

    def _thread(self, number: int, function: Callable[[int], Any]) -> None:
        self._own.number = number
        try:
            self._sleep()
            self._values[number] = function(number)
        except _GivenUp:
            pass
        except BaseException as error:
            if self._error is None:
                error.add_note(f"on rank {number} of {self._count}")
                self._error = error
        self._values.setdefault(number, None)
        self._next()

    def _sleep(self) -> None:
        self._may_run[self.here].acquire()
        if self._error is not None:
            raise _GivenUp

    def _next(self) -> None:
        """Let one thread that need not wait run; all of them in turn where one has failed."""
        ready = [n for n, (is_ready, _) in self._waiting.items() if self._error or is_ready()]
        if not ready and self._waiting:
            waits = "; ".join(f"{n}: {what}" for n, (_, what) in sorted(self._waiting.items()))
            self._error = Deadlock(f"every rank that has not ended waits: {waits}")
            ready = list(self._waiting)
        if not ready:
            self._all_ended.set()
            return
        chosen = self.random.choice(ready)
        del self._waiting[chosen]
        self._may_run[chosen].release()
