"""Pipeline ranks of a comparison: processes with one thread each on this machine, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = timedelta(hours=2)

Serve = Callable[[int, Any], dict[str, Any] | None]
"""Function of one rank: takes the rank and the script's arguments, and returns the report on rank
0."""


def run_ranks(serve: Serve, arguments: Any, *, ranks: int) -> dict[str, Any]:
    """Start a process for every rank and return the report of rank 0; exit if a rank fails.

    Args:
        serve: Function that each rank calls, with a default process group; defined in a module.
        arguments: Arguments of `serve`.
        ranks: Number of ranks.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:  # closed before rank 0 listens there
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    reports, answers = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_run_rank, args=(serve, rank, ranks, port, arguments, answers))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    report = None
    running: list[Any] = [process.sentinel for process in processes]
    while running:
        for ready in wait([reports, *running] if report is None else running):
            if ready is reports:
                report = reports.recv()
                continue
            running.remove(ready)
            process = next(process for process in processes if process.sentinel == ready)
            process.join()
            if process.exitcode:
                for other in processes:
                    other.terminate()
                sys.exit("error: a rank failed; see its error above")
    assert report is not None, "rank 0 reports before it ends"
    return dict(report)


def timed_s(step: Callable[[], None]) -> float:
    """Return the seconds of a step, from a barrier before it to a barrier after it."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def provenance() -> dict[str, Any]:
    """Return date, machine, versions and command of the measurement, for the JSON of a report."""
    return {
        "provenance": "measured",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": version("torch"),
        "command": shlex.join(["python", *sys.argv]),
    }


def _run_rank(
    serve: Serve, rank: int, ranks: int, port: int, arguments: Any, answers: Connection
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
    )
    report = serve(rank, arguments)
    if rank == 0:
        answers.send(report)
    dist.destroy_process_group()
