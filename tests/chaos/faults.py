"""Faults that strike a rank: the kinds, what each does to the process, and how a run may end."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from tests.chaos import places

STRUCK_FILE = "struck"
"""File with the time of the strike on the clock of ``time.monotonic``; a fault strikes once."""
_FOR_EVER_S = 3600

End = Literal["well", "asked", "fails", "hangs"]
"""How a run may end: as if nothing had happened; stopped by the signal that asked for it; with a
report of the rank that failed; or with a report once other ranks have waited in vain."""


class InjectedError(RuntimeError):
    """A bug in a rank."""

    def __str__(self) -> str:
        return "injected"


def _raise(_: float) -> NoReturn:
    raise InjectedError


def _raise_in_main_thread(_: float) -> None:
    thread = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(InjectedError))


def _signal(number: signal.Signals, *, launcher: bool = False) -> Callable[[float], None]:
    return lambda _: os.kill(os.getppid() if launcher else os.getpid(), number)


def _segfault(_: float) -> None:
    ctypes.string_at(0)


def _abort(_: float) -> None:
    os.abort()


def _hold_interpreter(_: float) -> None:
    """Keep the interpreter lock, as a call into a library does that never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none ends the sleep
    ctypes.PyDLL(None).sleep(_FOR_EVER_S)


def _be_slow(timeout_s: float) -> None:
    time.sleep(timeout_s / 4)


def _cut_connections(_: float) -> None:
    """Shut down every connection of this process to other ranks, as a lost network does."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as found:
                if (
                    found.family == socket.AF_INET
                    and str(found.getpeername()[1]) != os.environ["MASTER_PORT"]
                ):
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:  # no socket, or one without a peer
            continue


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault."""

    strike: Callable[[float], object]
    """Called in the rank, with ``parallel.timeout_s``."""
    end: End
    codes: tuple[int, ...]
    """Exit codes of the run in that case."""


FAULTS: Mapping[str, Fault] = {
    "exception": Fault(_raise, "fails", (1,)),
    "asynchronous exception": Fault(_raise_in_main_thread, "fails", (1,)),
    "INT": Fault(_signal(signal.SIGINT), "asked", (130,)),
    "TERM": Fault(_signal(signal.SIGTERM), "asked", (143,)),
    "INT to all": Fault(_signal(signal.SIGINT, launcher=True), "asked", (130,)),
    "TERM to all": Fault(_signal(signal.SIGTERM, launcher=True), "asked", (143,)),
    "KILL": Fault(_signal(signal.SIGKILL), "fails", (1,)),
    "KILL of the launcher": Fault(_signal(signal.SIGKILL, launcher=True), "fails", (-9,)),
    "STOP": Fault(_signal(signal.SIGSTOP), "hangs", (1,)),
    "segmentation fault": Fault(_segfault, "fails", (1,)),
    "abort": Fault(_abort, "fails", (1,)),
    "held interpreter": Fault(_hold_interpreter, "hangs", (1,)),
    "slow": Fault(_be_slow, "well", (0,)),
    "lost connections": Fault(_cut_connections, "fails", (1,)),
}


def inject(directory: str, kind: str, place: Mapping[str, Any], timeout_s: float) -> None:
    """Have a fault strike once in the ranks that this process starts; the hook of a run.

    Args:
        directory: Directory of the run, which gets :data:`STRUCK_FILE`.
        kind: One of :data:`FAULTS`.
        place: Fields of a :class:`tests.chaos.places.Place`.
        timeout_s: ``parallel.timeout_s`` of the run.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    struck = Path(directory, STRUCK_FILE)

    def strike() -> None:
        try:
            descriptor = os.open(struck, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(descriptor, str(time.monotonic()).encode())
        os.close(descriptor)
        FAULTS[kind].strike(timeout_s)

    hasten_launcher()
    places.strike_at(place, strike)


GRACE_S, TERMINATE_S = 1.5, 0.5


def hasten_launcher() -> None:
    """Shorten the times for which a launcher waits for ranks to end by themselves."""
    from sppo.parallel.job import launch
    from sppo.training import job

    launch._GRACE_S, launch._TERMINATE_S = GRACE_S, TERMINATE_S
    job.FAILED_STEP_TIMEOUT_S = GRACE_S / 3


def count(directory: str) -> None:
    """Count the calls of all places in a run without a fault; the hook of a reference run."""
    hasten_launcher()
    places.count_calls(directory)
