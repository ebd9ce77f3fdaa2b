"""Calls into libraries that may never return, given up after a time.

Imports nothing slow: it stands before every other import of the command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Event, Thread
from typing import TypeVar, cast

T = TypeVar("T")

_unanswered: list[Event] = []
"""Events of calls whose outcome nobody has taken: set once the call has returned."""
_without_shutdown = Event()


def call_in_time(make: Callable[[], T], *, limit_s: float) -> T:
    """Return what ``make`` returns; a thread is left behind with it if it takes too long.

    Raises:
        TimeoutError: it took longer than ``limit_s`` seconds.
    """
    outcomes: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()
    returned = Event()

    def attempt() -> None:
        try:
            outcomes.put((make(), None))
        except Exception as error:
            outcomes.put((None, error))
        finally:
            returned.set()

    _unanswered.append(returned)  # before it begins: a signal may come in the midst of starting
    try:
        Thread(target=attempt, name="timed call", daemon=True).start()
    except RuntimeError:  # the machine has no more threads: nothing was begun
        _unanswered.remove(returned)
        raise
    try:
        made, error = outcomes.get(timeout=min(limit_s, TIMEOUT_MAX))
    except Empty:
        raise TimeoutError from None
    _unanswered.remove(returned)
    if error is not None:
        raise error
    return cast(T, made)


def end_without_shutdown() -> None:
    """Let this process end without Python's shutdown: a device may no longer answer.

    What is given back then, groups of NCCL above all, would wait for it.
    """
    _without_shutdown.set()


@contextmanager
def without_calls_left_behind() -> Iterator[None]:
    """End the process at once where it is about to end and a call that was given up may return.

    If it returned while Python shuts down, its thread would be ended in the middle of C++ code, and
    the process would abort. So it ends after :func:`end_without_shutdown`, too.
    """
    try:
        yield
    except SystemExit as end:
        if _ends_at_once():
            os._exit(_flushed(end.code))
        raise
    except BaseException:
        if _ends_at_once():
            sys.excepthook(*sys.exc_info())
            os._exit(_flushed(1))
        raise


def _ends_at_once() -> bool:
    return _without_shutdown.is_set() or any(not returned.is_set() for returned in _unanswered)


def _flushed(code: str | int | None) -> int:
    """Write out what is buffered; return the exit code, as Python's shutdown finds it."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    number = code if isinstance(code, int) else int(code is not None)
    try:
        sys.stdout.flush()
    except OSError:
        number = number or 1
    with suppress(OSError):
        sys.stderr.flush()
    return number
