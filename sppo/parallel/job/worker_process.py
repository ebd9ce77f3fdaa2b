"""Worker process that evaluates functions and shares only their arguments with this process.

The worker is a new interpreter (`spawn`), without the sockets, locks and threads of this process.
It imports only the modules of the functions, not the script of this process, which may import
torch.
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
from sppo.parallel.job.signals import STOP_SIGNALS, held_back, signal_name

P = ParamSpec("P")
T = TypeVar("T")

_REAPED_S = 5.0
"""Longest time in seconds from a broken connection until the exit code of the worker is known."""
_LOOK_EVERY_S = 0.005


class WorkerLostError(RuntimeError):
    """The worker process could not be started, or ended before it returned a result."""


class WorkerProcess:
    """Process that evaluates one function after another, started by the first call.

    The worker has SIGTERM and SIGINT blocked, which may be sent to it together with this process.
    It ends with :meth:`close` or, on Linux, when this process ends for any reason.
    """

    def __init__(self) -> None:
        self._context = _RecordingContext()
        self._executor: ProcessPoolExecutor | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None if it does not run."""
        process = self._context.process
        return None if process is None else process.pid

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start to evaluate a module's function with arguments that can be pickled.

        Call from the main thread: the worker ends with the thread that started it.

        Raises:
            WorkerLostError: The worker cannot be started, or it has ended.
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
        """Return the result of a submitted call.

        Raises:
            TimeoutError: There is no result within ``timeout_s``; the call continues.
            WorkerLostError: The worker has ended.
            Exception: Any exception that the function raised.
        """
        try:
            return future.result(timeout_s)
        except (BrokenExecutor, CancelledError) as error:
            raise WorkerLostError(self._end()) from error

    def close(self) -> None:
        """Kill the worker; the next call to :meth:`submit` starts another one."""
        process = self._context.process
        if process is not None and process.pid is not None:  # its start may have failed
            process.kill()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor = self._context.process = None

    def _end(self) -> str:
        """Return how the worker ended, as text."""
        process = self._context.process
        if process is None:
            return "has ended"
        # The executor's thread waits for the process, too. Only one of the two threads reaps it;
        # the other sees the exit code a moment later.
        until_s = time.monotonic() + _REAPED_S
        while (code := process.exitcode) is None:
            if time.monotonic() > until_s:
                return "does not answer"
            time.sleep(_LOOK_EVERY_S)
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


class _RecordingContext(SpawnContext):
    """Multiprocessing context that spawns processes and keeps the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.process: SpawnProcess | None = None

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802 - the name it has there
        """Return a new process, and record it."""
        self.process = SpawnProcess(*args, **kwargs)
        return self.process


@contextmanager
def without_script() -> Iterator[None]:
    """Keep processes spawned during the context from importing the script of this process."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
