"""Worker processes that take turns, one for each side of a comparison.

Each side has its own process, so that its peak memory can be measured. A worker prints ``ready``
when it is set up, and answers each line on its standard input with one line of JSON: a measured
step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def take_turns(
    commands: Mapping[str, list[str]], *, turns: int, threads: int, label: str = ""
) -> dict[str, list[dict[str, Any]]]:
    """Start all sides, then let each run one step per turn; prints the time of each step.

    Args:
        commands: Script and arguments of each side's worker, for this Python.
        turns: Number of steps of each side.
        threads: Number of threads of each worker.
        label: Text at the beginning of every printed line.

    Returns:
        Answers of each side, turn by turn.
    """
    workers = {side: _start(side, command, threads=threads) for side, command in commands.items()}
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in commands}
    for turn in range(turns):
        for side, worker in workers.items():
            answer = _ask(worker)
            answers[side].append(answer)
            print(f"  {label}turn {turn} {side:<28} {answer['step_s']:.2f} s", flush=True)
    for worker in workers.values():
        assert worker.stdin is not None, "workers are started with pipes"
        worker.stdin.close()
        worker.wait()
    return answers


def _start(side: str, command: list[str], *, threads: int) -> subprocess.Popen[str]:
    """Start a worker for `side` and wait until it is ready; exit if it fails."""
    worker = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
    )
    assert worker.stdout is not None, "workers are started with pipes"
    if worker.stdout.readline().strip() != "ready":
        raise SystemExit(f"{side}: worker did not start; see its error above")
    return worker


def _ask(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """Return one measured step of a worker; exit if the worker has ended."""
    assert worker.stdin is not None, "workers are started with pipes"
    assert worker.stdout is not None, "workers are started with pipes"
    worker.stdin.write("step\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("a worker ended before its step was done; see its error above")
    answer: dict[str, Any] = json.loads(line)
    return answer
