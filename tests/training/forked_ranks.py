"""Runs functions on several ranks that share a gloo group, all forked from one warm process.

One process pays for importing torch, then forks every rank; it never computes, so children inherit
no threads. Run as ``python -m tests.training.forked_ranks``: reads one JSON object per line
(``module``, ``function``, ``size``, ``arguments``), answers with a list, one object per rank.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_GRACE_S = 10.0
"""How long ranks may go on when one of them was killed: a launcher would end them, too."""
_LIMIT_S = 60.0


@dataclass(frozen=True)
class RankEnded:
    """What became of one rank."""

    returncode: int
    """Negative: the signal that killed it."""
    value: Any
    """What the function returned; None if it did not."""
    error: str
    """The traceback of what it raised; empty if it did not."""


class ForkedRanks:
    """The other end: starts the process and asks it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.forked_ranks"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )

    def end(self, work: Callable[..., Any], *, size: int, arguments: list[Any]) -> list[RankEnded]:
        """What became of ``work(group, *arguments)`` on ``size`` ranks.

        Args:
            work: a function of a module; it gets the group, or None if ``size`` is 0: one process
                without torch.distributed.
            size: number of ranks.
            arguments: as JSON.
        """
        request = {
            "module": work.__module__,
            "function": work.__name__,
            "size": size,
            "arguments": arguments,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return [RankEnded(**rank) for rank in answer]

    def __call__(self, work: Callable[..., Any], *arguments: Any, size: int) -> list[Any]:
        """What ``work(group, *arguments)`` returned on each rank; it must return on all."""
        ended = self.end(work, size=size, arguments=list(arguments))
        for rank, end in enumerate(ended):
            assert end.returncode == 0, f"rank {rank} of {size}: {end.returncode}\n{end.error}"
        return [end.value for end in ended]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def run_rank(request: dict[str, Any], rank: int, store: str, answer: Path) -> None:
    """Be one rank; does not return."""
    import torch
    import torch.distributed as dist

    code, value, error = 0, None, ""
    try:
        torch.set_num_threads(1)
        group = None
        if request["size"] > 0:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=request["size"],
                timeout=timedelta(seconds=30),
            )
            group = dist.group.WORLD
        work = getattr(importlib.import_module(request["module"]), request["function"])
        value = work(group, *request["arguments"])
    except BaseException:
        code, error = 1, traceback.format_exc()
    answer.write_text(json.dumps({"value": value, "error": error}))
    os._exit(code)


def run_ranks(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Fork all ranks of one request and wait for them."""
    with tempfile.TemporaryDirectory() as directory:
        answers = [Path(directory) / str(rank) for rank in range(max(request["size"], 1))]
        children: dict[int, int] = {}
        for rank, answer in enumerate(answers):
            child = os.fork()
            if child == 0:
                run_rank(request, rank, f"{directory}/store", answer)
            children[child] = rank
        codes = wait(children)
        return [
            {
                "returncode": codes[rank],
                **(
                    json.loads(answer.read_text())
                    if answer.exists()
                    else {"value": None, "error": "killed"}
                ),
            }
            for rank, answer in enumerate(answers)
        ]


def wait(children: dict[int, int]) -> dict[int, int]:
    """Return codes by rank; the ranks that another one leaves behind are killed at last."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _LIMIT_S
    while len(codes) < len(children):
        for child, rank in children.items():
            if rank in codes:
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank] < 0:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return codes


def serve() -> None:
    """Answer requests until there are no more."""
    import sppo.checkpoint.checkpoint
    import tests.training.faulty_ranks

    del sppo, tests
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(run_ranks(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
