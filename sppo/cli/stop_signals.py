"""Handling of SIGTERM and SIGINT: one line on stderr, and exit code 128 plus the signal's number.

The first signal is raised as an exception in the main thread, so that locks and partial files are
cleaned up as after any other error. A second one ends the process at once. A training loop installs
:class:`sppo.training.interruption.StopRequest` instead, which saves first. This module is imported
before all others of the command, and therefore imports nothing slow.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from types import FrameType
from typing import Any

from sppo.parallel.job.handled_signals import add_listener, remove_listener
from sppo.parallel.job.signals import STOP_SIGNALS, stopped_exit_code

_UNHEARD_S = 5.0
"""Seconds that the main thread may spend in library code, where it cannot handle signals."""
_REPEATED_S = 0.2
"""Signals at most this many seconds apart count as one."""
_SURELY = 2
"""Consecutive checks that must find the main thread running on before the signal is sent again."""
_HANDLED = 0
"""Byte written after the bytes of signals that another handler has handled; no signal number."""
_MOST_BYTES = 4096


class Stopped(BaseException):
    """Request to end the process. Not an error: ``except Exception`` does not catch it.

    Attributes:
        number: Number of the signal.
        advice: Text to print after the name of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number, self.advice = number, ""


@contextmanager
def stop_signals() -> Iterator[None]:
    """End the process on SIGTERM or SIGINT with a message and exit code; for the main thread.

    Unblocks both signals: a launcher blocks them for its ranks until the ranks can report a signal.

    Raises:
        SystemExit: A signal arrived.
    """
    watch = _Watch()
    previous = {number: signal.signal(number, watch.stop) for number in STOP_SIGNALS}
    try:
        watch.begin()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        yield
    except BaseException as error:
        if watch.number is None:
            raise
        # Any exception counts: a library may have replaced Stopped by an exception of its own.
        advice = error.advice if isinstance(error, Stopped) else ""
        _say_stopped(watch.number, advice)
        sys.exit(stopped_exit_code(watch.number))
    finally:
        watch.end()
        if watch.number is None:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _Watch:
    """Handler that raises Stopped in the main thread, or ends the process if this is not possible.

    No exception is raised during an import: code that imports optional modules would take the
    exception for a missing module, and the process would continue with half of its modules.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the signal that the main thread has handled; None if there is none."""
        self._heard_s = 0.0
        self._ended = False
        self._reader, self._writer = os.pipe()
        self._previous_fd = -1

    def begin(self) -> None:
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        add_listener(self._mark_handled)
        threading.Thread(target=self._see_to_it, name="stop signals", daemon=True).start()

    def end(self) -> None:
        self._ended = True
        remove_listener(self._mark_handled)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._writer)  # ends the thread, which then reads the end of the pipe

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread: raise Stopped; on a second signal end the process."""
        if self.number is not None:
            if time.monotonic() - self._heard_s > _REPEATED_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif not _is_importing(frame):
            self.number, self._heard_s = number, time.monotonic()
            raise Stopped(number)

    def _mark_handled(self) -> None:
        """Mark all signals so far as handled by another handler."""
        os.write(self._writer, bytes((_HANDLED,)))

    def _see_to_it(self) -> None:
        """Send each signal again until the main thread has handled it; runs in a thread."""
        with os.fdopen(self._reader, "rb", buffering=0) as arrivals:
            while arrived := _read(arrivals, timeout_s=None):
                if number := self._unheard(arrivals, arrived):
                    self._insist(number, arrivals)

    def _unheard(self, arrivals: FileIO, arrived: bytes) -> int:
        """Return the number of a signal that no other handler has handled or will handle, or 0.

        A training loop handles signals between its actions, however long these take. Its handler
        reports handled signals before this object's handler is restored, so the report is read
        after the handlers.
        """
        handled_here = {n for n in STOP_SIGNALS if signal.getsignal(n) == self.stop}
        arrived += _read(arrivals, timeout_s=0)
        unhandled = arrived.rpartition(bytes((_HANDLED,)))[2]
        return next((number for number in unhandled if number in handled_here), 0)

    def _insist(self, number: int, arrivals: FileIO) -> None:
        """Send a signal again until the main thread ends, whatever code catches the exception."""
        until_s = time.monotonic() + _UNHEARD_S
        goes_on = 0
        while time.monotonic() < until_s:
            time.sleep(_REPEATED_S / 4)
            if self._ended or (
                self.number is None and not self._unheard(arrivals, bytes([number]))
            ):
                return
            if self.number is not None:
                goes_on = 0 if _handles_stopped() else goes_on + 1
                if goes_on < _SURELY:
                    until_s = time.monotonic() + _UNHEARD_S
                    continue
                self.number = None
            os.kill(os.getpid(), number)
        _say_stopped(number)
        os._exit(stopped_exit_code(number))


def _handles_stopped() -> bool:
    """Return whether the main thread is still unwinding a Stopped that no library has swallowed."""
    main = threading.main_thread().ident
    assert main is not None, "it runs"
    found: Any = sys._current_exceptions().get(main)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # until 3.11
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    return error is not None


def _read(arrivals: FileIO, *, timeout_s: float | None) -> bytes:
    """Return the bytes that arrive in time; none, too, once the writer is closed."""
    ready, _, _ = select.select([arrivals], [], [], timeout_s)
    return (arrivals.read(_MOST_BYTES) or b"") if ready else b""


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _say_stopped(number: int, advice: str = "") -> None:
    """Print which signal ended the process, unless the launcher says why it stopped this rank."""
    from sppo.parallel.job.environment import is_stopped_rank

    if not is_stopped_rank(os.environ):
        os.write(2, f"error: stopped by {signal.Signals(number).name}{advice}\n".encode())
