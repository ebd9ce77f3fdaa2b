"""Faults that strike a rank: the kinds, what each does to the process, and how a run may end."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from tests.chaos import flips, networks, places
from tests.chaos.strike import Strike

STRUCK_FILE, FILLER_FILE = "struck", "filler"
"""Files of a run: the time of the strike on the clock of ``time.monotonic``, as each fault strikes
once; and what fills the disk."""
GRACE_S, TERMINATE_S = 1.5, 0.5
"""Times for which launchers wait for ranks to end by themselves, and after SIGTERM."""
_FOR_EVER_S = 3600

End = Literal["well", "asked", "fails", "hangs"]
"""How a run may end: as if nothing had happened; stopped by the signal that asked for it; with a
report of the rank that failed; or with a report once other ranks have waited in vain."""


class InjectedError(RuntimeError):
    """A bug in a rank."""

    def __str__(self) -> str:
        return "injected"


def _raise(strike: Strike) -> NoReturn:
    raise InjectedError


def _run_out_of_memory(strike: Strike) -> NoReturn:
    raise MemoryError("injected")


def _raise_in_main_thread(strike: Strike) -> None:
    thread = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(InjectedError))


def _signal(number: signal.Signals, *, launcher: bool = False) -> Callable[[Strike], None]:
    return lambda strike: os.kill(os.getppid() if launcher else os.getpid(), number)


def _segfault(strike: Strike) -> None:
    ctypes.string_at(0)


def _abort(strike: Strike) -> None:
    os.abort()


def _hold_interpreter(strike: Strike) -> None:
    """Keep the interpreter lock, as a call into a library does that never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none ends the sleep
    ctypes.PyDLL(None).sleep(_FOR_EVER_S)


def _be_slow(strike: Strike) -> None:
    time.sleep(strike.timeout_s / 4)


def _fill_disk(strike: Strike) -> None:
    """Take all free space of the disk of the run."""
    disk = os.statvfs(strike.directory)
    with (strike.directory / FILLER_FILE).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_bsize)


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault."""

    strike: Callable[[Strike], object]
    """Called in the rank."""
    end: End
    code: int
    """Exit code of the run in that case."""
    names_rank: bool = True
    """Whether the report names the rank that was struck."""
    functions: tuple[str, ...] | None = None
    """Only functions of :mod:`tests.chaos.places` that it strikes; None for all."""
    moments: tuple[places.Moment, ...] = ("before", "inside", "after")
    prepare: Callable[[], None] = lambda: None
    """Called in the launcher before it starts ranks."""
    is_ready: Callable[[], bool] = lambda: True
    """Whether it can strike now; otherwise it waits for a later call of the function."""
    words: tuple[str, ...] = ()
    """Keys of the run that it needs."""
    timeout_s: int = 60
    """``parallel.timeout_s`` of the run: long, for a busy machine, where nothing waits for it."""
    needs_isolation: bool = False
    """Whether it needs a disk or a network of its own."""
    is_bug: bool = False
    """Whether it looks like a bug: its traceback is shown, and others may name the rank."""


FAULTS: Mapping[str, Fault] = {
    "exception": Fault(_raise, "fails", 1, is_bug=True),
    "asynchronous exception": Fault(_raise_in_main_thread, "fails", 1, is_bug=True),
    "out of memory": Fault(_run_out_of_memory, "fails", 4, names_rank=False),
    "INT": Fault(_signal(signal.SIGINT), "asked", 130, names_rank=False),
    "TERM": Fault(_signal(signal.SIGTERM), "asked", 143, names_rank=False),
    "INT to all": Fault(_signal(signal.SIGINT, launcher=True), "asked", 130, names_rank=False),
    "TERM to all": Fault(_signal(signal.SIGTERM, launcher=True), "asked", 143, names_rank=False),
    "KILL": Fault(_signal(signal.SIGKILL), "fails", 1),
    "KILL of the launcher": Fault(_signal(signal.SIGKILL, launcher=True), "fails", -9),
    "STOP": Fault(_signal(signal.SIGSTOP), "hangs", 1, timeout_s=5),
    "segmentation fault": Fault(_segfault, "fails", 1),
    "abort": Fault(_abort, "fails", 1),
    "held interpreter": Fault(_hold_interpreter, "hangs", 1, timeout_s=5),
    "slow": Fault(_be_slow, "well", 0, timeout_s=10),
    "full disk": Fault(_fill_disk, "fails", 4, names_rank=False, needs_isolation=True),
    "lost connections": Fault(networks.cut_connections, "fails", 1, names_rank=False),
    "lost network": Fault(
        networks.lose,
        "hangs",
        1,
        names_rank=False,
        prepare=networks.have_own_network,
        needs_isolation=True,
        timeout_s=5,
    ),
    "network away for a moment": Fault(
        networks.lose_for_a_moment,
        "well",
        0,
        prepare=networks.have_own_network,
        needs_isolation=True,
        timeout_s=20,
    ),
    "flipped gradient": Fault(
        flips.flip_gradient,
        "fails",
        5,
        functions=("sppo.training.state.TrainingState.finish_gradients",),
        moments=("after",),
        prepare=flips.watch_state,
    ),
    "flipped weight": Fault(
        flips.flip_weight,
        "fails",
        5,
        functions=tuple(
            name
            for kind in ("collective", "copy", "compute", "save")
            for name in places.KINDS[kind]
        ),
        prepare=flips.watch_state,
        is_ready=flips.weights_are_watched,
    ),
    "flipped block": Fault(
        flips.flip_block,
        "fails",
        1,
        functions=("sppo.offload.disk.file_tier.FileTier._move",),
        moments=("before",),
        words=("activations.debug=true",),
        is_bug=True,
    ),
}


def inject(directory: str, kind: str, place: Mapping[str, Any], seed: int) -> None:
    """Have a fault strike once in the ranks that this process starts; the hook of a run.

    Args:
        directory: Directory of the run, which gets :data:`STRUCK_FILE`.
        kind: One of :data:`FAULTS`.
        place: Fields of a :class:`tests.chaos.places.Place`.
        seed: Seed of what the fault draws.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fault, struck = FAULTS[kind], Path(directory, STRUCK_FILE)

    def strike(arguments: tuple[Any, ...]) -> None:
        if not fault.is_ready():
            return
        try:
            descriptor = os.open(struck, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(descriptor, str(time.monotonic()).encode())
        os.close(descriptor)
        fault.strike(Strike(Path(directory), fault.timeout_s, random.Random(seed), arguments))

    hasten_launcher()
    fault.prepare()
    places.strike_at(place, strike)


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
