"""Seconds from a fault to the next good step of the quickstart's model on two ranks, by part.

Ranks are killed in turn, each once the step after the last restart is saved. ``sppo train`` writes
the parts into ``failures.jsonl``: those of a fault into its own line, those of the restart into the
line of the next fault. The sum is measured here, from the kill to the record of the next step;
what the parts leave of it is the time until the kill was noticed.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from experiments import harness
from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY
from sppo.report.metrics import METRICS_FILE, read_metrics

_RUN_FILE = harness.ROOT / "configs/run/tiny_cpu.yaml"
_LEARN = ("asyncio", "email", "json", "logging")
"""Packages of the standard library that the model learns."""
_WORDS = ("parallel.pipeline_parallel_degree=2", "train.steps=1000", "checkpoint.every=1")
_OF_START = ("started", "planned", "loaded", "first step")
_LIMIT_S = 600.0


def restart(options: argparse.Namespace) -> dict[str, Any]:
    """Return the table of seconds from a fault to the next good step, and print it."""
    with tempfile.TemporaryDirectory() as name:
        totals, failures = _measured(Path(name), faults=options.faults)
    rows = [
        _row(fault, then["seconds"], total_s)
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
    return {"rows": rows, "median_s": middle, "run": [_RUN_FILE.name, *_WORDS], "nice": os.nice(0)}


def median_row(report: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings of the parts, and one row with the medians of a report."""
    middle = report["median_s"]
    return tuple(middle), [tuple(f"{seconds:.1f} s" for seconds in middle.values())]


def _row(fault: dict[str, Any], then: dict[str, float], total_s: float) -> dict[str, Any]:
    """Return the seconds of one fault by part; ``then`` are those of the start that followed."""
    parts = {"ended": fault["seconds"]["ended"], **{part: then[part] for part in _OF_START}}
    noticed_s = total_s - sum(parts.values())
    return {"rank": fault["rank"], "noticed": noticed_s, **parts, "in all": total_s}


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
        done = _step_after(0, output, launcher)
        for fault in range(faults + 1):  # the last one ends the run
            done = _step_after(done, output, launcher)
            saved = output / CHECKPOINTS_DIRECTORY / f"step_{done:06}"
            _wait(launcher, saved.exists)
            began_s = time.monotonic()
            os.kill(_rank(launcher.pid, fault % 2), signal.SIGKILL)
            if fault < faults:
                done = _step_after(done, output, launcher)
                totals.append(time.monotonic() - began_s)
        launcher.wait(_LIMIT_S)
    lines = (output / "failures.jsonl").read_text().splitlines()
    return totals, [json.loads(line) for line in lines]


def _wait(launcher: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _LIMIT_S
    while not until():
        if launcher.poll() is not None or time.monotonic() > until_s:
            launcher.kill()  # its ranks end with it
            sys.exit(f"error: the run ended or hangs: exit code {launcher.poll()}")
        time.sleep(0.01)


def _step_after(step: int, output: Path, launcher: subprocess.Popen[bytes]) -> int:
    """Wait for the record of a step after ``step``, and return its number."""
    metrics = output / METRICS_FILE

    def last() -> int:
        records = read_metrics(metrics) if metrics.exists() else []
        return records[-1].step if records else 0

    _wait(launcher, lambda: last() > step)
    return last()


def _rank(launcher: int, number: int) -> int:
    """Return the process id of a rank."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with suppress(OSError):
            if f"\0RANK={number}\0" in Path(f"/proc/{child}/environ").read_text():
                return int(child)
    sys.exit(f"error: rank {number} does not run")
