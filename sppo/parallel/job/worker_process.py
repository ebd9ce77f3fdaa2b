"""One process beside this one that evaluates functions, with nothing of this one but arguments.

It starts as a new interpreter (`spawn`), so it has no sockets, locks or threads of this process,
and imports only what it is asked to evaluate: not this process's script, which may import torch.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from sppo.parallel.job.end_with_parent import end_with_parent
from sppo.parallel.job.launch import held_back
from sppo.parallel.job.signals import STOP_SIGNALS, signal_name

P = ParamSpec("P")
T = TypeVar("T")

_REAPED_S = 5.0
"""Seconds within which a process whose connection has broken is known to have ended."""
_LOOK_EVERY_S = 0.005


class WorkerLostError(RuntimeError):
    """The process could not be started, or ended before it had answered."""


class WorkerProcess:
    """A process that evaluates one function after another; it starts with the first.

    SIGTERM and SIGINT, which may reach it along with this process, do not end it: it ends with
    :meth:`close`, and with this process however that ends (on Linux).
    """

    def __init__(self) -> None:
        self._context = _RecordingContext()
        self._executor: ProcessPoolExecutor | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id; None where it does not run."""
        process = self._context.process
        return None if process is None else process.pid

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Evaluate a function of a module with arguments that can be pickled.

        Call it in the main thread: the process ends with the thread that started it.

        Raises:
            WorkerLostError: it cannot be started, or it has ended.
        """
        if multiprocessing.current_process().daemon:
            raise WorkerLostError("cannot be started by a daemonic process")
        try:
            if self._executor is None:
                self._executor = ProcessPoolExecutor(
                    1, self._context, initializer=end_with_parent, initargs=(os.getpid(),)
                )
            with held_back(STOP_SIGNALS), without_script():
                return self._executor.submit(function, *args, **kwargs)
        except BrokenExecutor as error:
            raise WorkerLostError(self._end()) from error
        except (OSError, NotImplementedError) as error:
            raise WorkerLostError(f"cannot be started: {error}") from error

    def result(self, future: Future[T], *, timeout_s: float) -> T:
        """Return what became of a call.

        Raises:
            TimeoutError: nothing within the time; the call goes on.
            WorkerLostError: the process has ended.
            Exception: what the function raised.
        """
        try:
            return future.result(timeout_s)
        except (BrokenExecutor, CancelledError) as error:
            raise WorkerLostError(self._end()) from error

    def close(self) -> None:
        """Kill the process, whatever it does; the next call starts another one."""
        if self._context.process is not None:
            self._context.process.kill()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor = self._context.process = None

    def _end(self) -> str:
        """Say how the process ended."""
        process = self._context.process
        if process is None:
            return "has ended"
        # The executor's thread waits for it, too; whichever of the two does not learn of its end
        # is told by the other a moment later.
        until_s = time.monotonic() + _REAPED_S
        while (code := process.exitcode) is None:
            if time.monotonic() > until_s:
                return "does not answer"
            time.sleep(_LOOK_EVERY_S)
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


class _RecordingContext(SpawnContext):
    """Starts processes as `spawn` does, and keeps the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.process: SpawnProcess | None = None

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802 - the name it has there
        """Make a process."""
        self.process = SpawnProcess(*args, **kwargs)
        return self.process


@contextmanager
def without_script() -> Iterator[None]:
    """Keep a process that starts within from running the script that this one runs."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
