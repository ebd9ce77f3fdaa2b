"""Processes that communicate over gloo, started once and used by many tests.

Every rank is a process with one thread; the first ranks, as many as a case needs, form its world.
The processes are forked from a server that has imported torch, so that starting them is cheap.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

WORLD_SIZE = 8
TIMEOUT_S = 40.0
PRELOADED = (
    "tests.random_training.run_leg",
    "tests.training.whole_runs.test_parallel_runs",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
)
"""What ranks would otherwise import one by one, in as many processes as a test has."""


class RankPool:
    """``WORLD_SIZE`` processes, started at the first case, and anew after one that failed."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._world_size = self._worlds = 0

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        """What ``function(rank, *arguments)`` returns in each of the first ``ranks`` processes.

        Raises:
            AssertionError: with the tracebacks of all ranks that failed.
        """
        if not self._processes:
            self._start()
        if ranks != self._world_size:  # processes of a world all belong to it
            self._world_size, self._worlds = ranks, self._worlds + 1
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, self._worlds, function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        while waiting:
            ready = wait(list(waiting), timeout=2 * TIMEOUT_S)
            if not ready:
                self.close()
                raise AssertionError(f"ranks {sorted(waiting.values())} did not answer")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process ended")
        failures = [f"rank {r}:\n{text}" for r, (well, text) in sorted(answers.items()) if not well]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [answers[rank][1] for rank in range(ranks)]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes, self._world_size = [], [], 0

    def _start(self) -> None:
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("forkserver")
        forkserver._forkserver._stop()  # one of sppo data prepare, which imported less
        context.set_forkserver_preload(list(PRELOADED))
        # The server passes over what it does not find, and would not look where this process does.
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
            forkserver.ensure_running()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(WORLD_SIZE):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._store.port, there), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)


def _serve(rank: int, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # collections leave out what was imported
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    joined = 0
    while True:
        try:
            ranks, world, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if world != joined:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"world {world}", store),
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=TIMEOUT_S),
                )
                joined = world
            answer = (True, function(rank, *arguments))
        except BaseException as error:
            notes = "\n".join(getattr(error, "__notes__", []))
            answer = (False, f"{traceback.format_exc()}{notes}")
        pipe.send(answer)
