"""Seconds from a fault to the next good step of the quickstart's model on two ranks, by part.

Ranks are killed in turn, each a step after the last restart. ``sppo train`` writes the parts into
``failures.jsonl``: those of a fault into its own line, those of the restart into the line of the
next fault. The sum is measured here, from the kill to the record of the next step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from experiments import harness

_RUN_FILE = harness.ROOT / "configs/run/tiny_cpu.yaml"
_LEARN = ("asyncio", "email", "json", "logging")
"""Packages of the standard library that the model learns."""
_WORDS = ("parallel.pipeline_parallel_degree=2", "train.steps=1000", "checkpoint.every=1")
_OF_FAULT, _OF_START = ("noticed", "ended"), ("started", "planned", "loaded", "first step")
_LIMIT_S = 600.0


def restart(options: argparse.Namespace) -> dict[str, Any]:
    """Return the table of seconds from a fault to the next good step, and print it."""
    with tempfile.TemporaryDirectory() as name:
        totals, failures = _measured(Path(name), faults=options.faults)
    rows = [
        {
            "rank": fault["rank"],
            **{part: fault["seconds"][part] for part in _OF_FAULT},
            **{part: then["seconds"][part] for part in _OF_START},
            "in all": total_s,
        }
        for (fault, then), total_s in zip(pairwise(failures), totals, strict=True)
    ]
    middle = {part: median(row[part] for row in rows) for part in rows[0] if part != "rank"}
    harness.print_table(
        ["killed rank", *middle],
        [
            *([row["rank"], *(f"{row[part]:.2f}" for part in middle)] for row in rows),
            ["median", *(f"{seconds:.2f}" for seconds in middle.values())],
        ],
    )
    return {"rows": rows, "median_s": middle, "run": [_RUN_FILE.name, *_WORDS]}


def _measured(directory: Path, *, faults: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Train, kill ranks, and return the seconds to the next steps, and the recorded failures."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    sources = [stdlib / package for package in _LEARN]
    prepare = ("data", "prepare", "--tokenizer", "bytes", "--glob", "*.py", "--out", "data/stdlib")
    harness.sppo(*prepare, *sources, cwd=directory)
    train = [sys.executable, "-m", "sppo", "train", str(_RUN_FILE), *_WORDS]
    output = directory / "runs/tiny_cpu"
    totals = []
    with (directory / "said").open("w") as said:
        launcher = subprocess.Popen(
            [*train, f"train.restarts={faults}"], cwd=directory, stdout=said, stderr=said
        )
        _wait(launcher, lambda: _steps(output) > 0)
        for fault in range(faults + 1):  # the last one ends the run
            done = _steps(output)
            _wait(launcher, lambda done=done: _steps(output) > done)
            done, began_s = _steps(output), time.monotonic()
            os.kill(_rank(launcher.pid, fault % 2), signal.SIGKILL)
            if fault < faults:
                _wait(launcher, lambda done=done: _steps(output) > done)
                totals.append(time.monotonic() - began_s)
        launcher.wait(_LIMIT_S)
    lines = (output / "failures.jsonl").read_text().splitlines()
    return totals, [json.loads(line) for line in lines]


def _wait(launcher: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _LIMIT_S
    while not until():
        if launcher.poll() is not None or time.monotonic() > until_s:
            sys.exit(f"error: the run ended or hangs: exit code {launcher.poll()}")
        time.sleep(0.01)


def _steps(output: Path) -> int:
    """Return the number of the last recorded step."""
    metrics = output / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _rank(launcher: int, number: int) -> int:
    """Return the process id of a rank."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with suppress(OSError):
            if f"\0RANK={number}\0" in Path(f"/proc/{child}/environ").read_text():
                return int(child)
    sys.exit(f"error: rank {number} does not run")
