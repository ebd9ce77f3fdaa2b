"""Handling of SIGTERM and SIGINT: one line on stderr, and exit code 128 plus the signal's number.

The first signal is raised as an exception in the main thread, so that locks and partial files are
cleaned up as after any other error. A second one ends the process at once, and so does a first one
whose exception would be lost: in an import, a destructor or a callback. A training loop installs
:class:`sppo.training.interruption.StopRequest` instead, which saves first. This module is imported
before all others of the command, with all that its handler needs: a handler that imported a module
could interrupt the import of the same module.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from sppo.parallel.job.environment import is_stopped_rank
from sppo.parallel.job.signals import STOP_SIGNALS, stopped_exit_code

_REPEATED_S = 0.2
"""Signals at most this many seconds apart count as one: a terminal and a launcher send one each."""


class Stopped(BaseException):
    """Request to end the process. Not an error: ``except Exception`` does not catch it."""

    advice = ""
    """Text that follows the name of the signal in the message."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = stopped_exit_code(number)
        """Exit code; it also tells a rank's flight record that the reason is printed elsewhere."""


@contextmanager
def stop_signals() -> Iterator[None]:
    """End the process on SIGTERM or SIGINT with a message and exit code; for the main thread.

    Unblocks both signals: a launcher blocks them for its ranks until the ranks can report a signal.
    The handlers stay when the context ends, as the process then does.

    Raises:
        SystemExit: A signal arrived.
    """
    handler = _Handler()
    sys.unraisablehook = _ignored
    for number in STOP_SIGNALS:
        signal.signal(number, handler.stop)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        yield
    except BaseException as error:
        if handler.number is None:
            raise
        # Any exception counts: a library may have replaced Stopped by an exception of its own.
        _say_stopped(handler.number, error.advice if isinstance(error, Stopped) else "")
        sys.exit(stopped_exit_code(handler.number))


class _Handler:
    """Handler that raises Stopped at the first signal, and ends the process at the second."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the first signal; None before any."""
        self._first_s = 0.0

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal.

        Code that imports an optional module would take an exception for a missing module, and the
        process would continue with half of its modules: a signal in an import ends it at once.
        """
        if self.number is not None:
            if time.monotonic() - self._first_s > _REPEATED_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.number, self._first_s = number, time.monotonic()
        if _is_importing(frame):
            _end_at_once(number)
        raise Stopped(number)


def _ignored(ignored: sys.UnraisableHookArgs) -> None:
    """End the process if Python ignores Stopped, as it does in destructors and callbacks."""
    if isinstance(ignored.exc_value, Stopped):
        _end_at_once(ignored.exc_value.number)
    sys.__unraisablehook__(ignored)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end_at_once(number: int) -> NoReturn:
    _say_stopped(number)
    os._exit(stopped_exit_code(number))


def _say_stopped(number: int, advice: str = "") -> None:
    """Print which signal ended the process, unless the launcher says why it stopped this rank."""
    if not is_stopped_rank(os.environ):
        os.write(2, f"error: stopped by {signal.Signals(number).name}{advice}\n".encode())
