"""SIGTERM and SIGINT end any command with one line on stderr and exit code 128 plus their number.

The first one is raised as an exception in the main thread, so that locks and partial files go as
after any other error; a second one ends the process at once. A training loop takes over with
:class:`sppo.training.interruption.StopRequest`, which saves first. Imports nothing slow: it stands
before every other import of the command.
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

from sppo.parallel.job.signals import STOP_SIGNALS, stopped_exit_code
from sppo.parallel.job.taken_signals import listen, stop_listening

_UNHEARD_S = 5.0
"""Seconds that the main thread may be inside a library, where it hears no signal."""
_REPEATED_S = 0.2
"""Signals this close to each other count as one."""
_SURELY = 2
"""Looks at the main thread in a row, none of which finds it unwinding."""
_TAKEN = 0
"""Byte behind those of signals that another handler has taken; no signal has this number."""
_MOST_BYTES = 4096


class Stopped(BaseException):
    """The process was asked to end; no fault, so ``except Exception`` lets it through.

    Attributes:
        number: The signal's.
        advice: What to say after its name.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number, self.advice = number, ""


@contextmanager
def stop_signals() -> Iterator[None]:
    """End the process by SIGTERM or SIGINT with a line and its exit code; for the main thread.

    Signals that were blocked so far are let through: a launcher holds them back for its ranks until
    they can say that one came.

    Raises:
        SystemExit: a signal came.
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
        # Whatever came out of it, e.g. of a library that lets no exception pass.
        advice = error.advice if isinstance(error, Stopped) else ""
        print(_line(watch.number, advice), file=sys.stderr, flush=True)
        sys.exit(stopped_exit_code(watch.number))
    finally:
        watch.end()
        if watch.number is None:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _Watch:
    """Raises Stopped in the main thread, or ends the process where that thread cannot hear.

    No exception is raised within an import: modules that are imported on trial would take it for
    their absence, and the process would go on with half of them.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that the main thread has heard."""
        self._heard_s = 0.0
        self._ended = False
        self._reader, self._writer = os.pipe()
        self._previous_fd = -1

    def begin(self) -> None:
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        listen(self._taken)
        threading.Thread(target=self._see_to_it, name="stop signals", daemon=True).start()

    def end(self) -> None:
        self._ended = True
        stop_listening(self._taken)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._writer)  # which ends the thread

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread: raise Stopped, or end at once if it is the second."""
        if self.number is not None:
            if time.monotonic() - self._heard_s > _REPEATED_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif not _is_importing(frame):
            self.number, self._heard_s = number, time.monotonic()
            raise Stopped(number)

    def _taken(self) -> None:
        """Mark all signals so far as taken by another handler."""
        os.write(self._writer, bytes((_TAKEN,)))

    def _see_to_it(self) -> None:
        """Repeat each signal until the main thread has heard it; for a thread."""
        with os.fdopen(self._reader, "rb", buffering=0) as arrivals:
            while arrived := _read(arrivals, timeout_s=None):
                if number := self._unheard(arrivals, arrived):
                    self._insist(number, arrivals)

    def _unheard(self, arrivals: FileIO, arrived: bytes) -> int:
        """Return the number of a signal that no other handler took or is going to take; or 0.

        A training loop hears signals between its actions, however long these take. Its handler
        says what it took before this watch's handler is back, so that is read after looking.
        """
        handled_here = {n for n in STOP_SIGNALS if signal.getsignal(n) == self.stop}
        arrived += _read(arrivals, timeout_s=0)
        untaken = arrived.rpartition(bytes((_TAKEN,)))[2]
        return next((number for number in untaken if number in handled_here), 0)

    def _insist(self, number: int, arrivals: FileIO) -> None:
        """Repeat a signal until the main thread ends by it, whatever may catch what it raises."""
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
        os.write(2, f"{_line(number, '')}\n".encode())
        os._exit(stopped_exit_code(number))


def _handles_stopped() -> bool:
    """Return whether the main thread still unwinds a Stopped that no library caught for good."""
    main = threading.main_thread().ident
    assert main is not None, "it runs"
    found: Any = sys._current_exceptions().get(main)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # until 3.11
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    return error is not None


def _read(arrivals: FileIO, *, timeout_s: float | None) -> bytes:
    """Return the bytes that are there or come in time; none, too, once the writer has closed."""
    ready, _, _ = select.select([arrivals], [], [], timeout_s)
    return (arrivals.read(_MOST_BYTES) or b"") if ready else b""


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _line(number: int, advice: str) -> str:
    return f"error: stopped by {signal.Signals(number).name}{advice}"
