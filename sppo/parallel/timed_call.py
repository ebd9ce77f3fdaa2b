"""Calls into libraries that may never return, given up after a time."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Thread
from typing import TypeVar, cast

T = TypeVar("T")

_left_behind: list[Thread] = []


def call_in_time(make: Callable[[], T], *, limit_s: float) -> T:
    """Return what ``make`` returns; a thread is left behind with it if it takes too long.

    Raises:
        TimeoutError: it took longer than ``limit_s`` seconds.
    """
    outcomes: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def attempt() -> None:
        try:
            outcomes.put((make(), None))
        except Exception as error:
            outcomes.put((None, error))

    thread = Thread(target=attempt, name="timed call", daemon=True)
    thread.start()
    try:
        made, error = outcomes.get(timeout=min(limit_s, TIMEOUT_MAX))
    except Empty:
        _left_behind.append(thread)
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast(T, made)


def calls_left_behind() -> bool:
    """Whether a call that was given up may still return.

    If it returns while Python shuts down, its thread is ended in the middle of C++ code, and the
    process aborts. A process that has one must end without Python's shutdown.
    """
    return any(thread.is_alive() for thread in _left_behind)
