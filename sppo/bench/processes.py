"""Processes that measure at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, closing
from typing import Any, TypeVar

from sppo.parallel.job.worker_process import WorkerProcess

T = TypeVar("T")


def at_once(
    function: Callable[..., T],
    arguments: Sequence[tuple[Any, ...]],
    *,
    timeout_s: float,
    advance: Callable[[], None],
) -> list[T]:
    """Call a module's function in a process for each entry of ``arguments``; return the results.

    All processes are killed at the end, also where one of them fails.

    Args:
        function: Function to call.
        arguments: Arguments of the call in each process, which can be pickled.
        timeout_s: Longest time that all calls together may take.
        advance: Called after each call.

    Raises:
        TimeoutError: The calls took too long.
        WorkerLostError: A process ended.
        Exception: The first exception that a call raised.
    """
    with ExitStack() as stack:
        workers = {}
        for words in arguments:
            worker = stack.enter_context(closing(WorkerProcess()))
            workers[worker.submit(function, *words)] = worker
        for future in as_completed(workers, timeout_s):
            workers[future].result(future, timeout_s=0)
            advance()
        return [future.result() for future in workers]
