"""Timeouts for calls into libraries that may never return.

Imports nothing slow, because the command imports this module before all others.
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
"""Events of calls that are waited for or have timed out; each is set when its call returns."""
_without_shutdown = Event()


def call_in_time(make: Callable[[], T], *, limit_s: float) -> T:
    """Return the result of ``make``, called in a thread that is abandoned after ``limit_s``.

    Raises:
        TimeoutError: The call took longer than ``limit_s`` seconds.
        Exception: Any exception that ``make`` raised.
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

    _unanswered.append(returned)  # before the start, which a signal handler may interrupt
    try:
        Thread(target=attempt, name="timed call", daemon=True).start()
    except RuntimeError:  # no thread can be started
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
    """Make this process exit without Python's shutdown, because a device may no longer answer.

    Destructors that run at shutdown, above all those of NCCL groups, would wait for the device.
    """
    _without_shutdown.set()


@contextmanager
def without_calls_left_behind() -> Iterator[None]:
    """Exit without Python's shutdown if the context ends the process and a call is abandoned.

    If such a call returned during shutdown, its thread would be killed inside C++ code, and the
    process would abort. Also exits without shutdown after :func:`end_without_shutdown`.
    """
    try:
        yield
    except BaseException as end:
        if not _ends_at_once():
            raise
        if isinstance(end, SystemExit):
            os._exit(_flushed(end.code))
        sys.excepthook(*sys.exc_info())
        os._exit(_flushed(1))


def _ends_at_once() -> bool:
    return _without_shutdown.is_set() or any(not returned.is_set() for returned in _unanswered)


def _flushed(code: str | int | None) -> int:
    """Flush stdout and stderr; return the exit code that Python's shutdown would give."""
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
