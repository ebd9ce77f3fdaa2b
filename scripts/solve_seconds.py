"""Measure how long ``sppo solve`` takes, in processor seconds of the whole command.

The requests take turns. The speed of shared machines changes, so a fixed computation runs before
and after each command; its fastest time over all turns, divided by its mean time around a command,
is the speed of the core at that command, 1 at most.

    python scripts/solve_seconds.py --turns 5 --output docs/results/solve_seconds.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from option_types import output_file, positive  # beside this file

from sppo.hardware.this_machine import cpu_model
from sppo.output_file import write_text


@dataclass(frozen=True, slots=True)
class Request:
    """Model on a number of nodes of eight devices, one sequence a step."""

    model: str
    length: str
    hardware: str
    nodes: int

    @property
    def title(self) -> str:
        """Model, length, and number and kind of devices."""
        return f"{self.model} {self.length}, {8 * self.nodes} {self.hardware}"

    @property
    def words(self) -> list[str]:
        """Arguments of ``sppo solve`` after the run file."""
        return [
            f"model.preset={self.model}",
            f"sequence.length={self.length}",
            f"hardware.preset={self.hardware}",
            f"hardware.nodes={self.nodes}",
        ]


REQUESTS = (
    Request("llama-3.1-70b", "4Mi", "h100", 128),
    Request("gpt-65b", "4Mi", "a100-80g", 128),
    Request("gpt-7b", "4Mi", "a100-80g", 16),
    Request("gpt-7b", "1Mi", "a100-80g", 4),
    Request("llama-3.1-8b", "1Mi", "h100", 1),
)
RUN_FILE = "{model: {preset: tiny}, data: {tokens: none}, sequence: {length: 4Ki}}\n"
_SOLVE = "from sppo.__main__ import main; main()"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One command.

    Attributes:
        processor_s: Processor seconds of the command, with Python's start and imports.
        loop_s: Mean processor seconds of the fixed computation before and after.
        least_loop_s: Least processor seconds of the fixed computation before and after.
    """

    processor_s: float
    loop_s: float
    least_loop_s: float


def main() -> None:
    """Measure the requests in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=positive, default=5)
    parser.add_argument("--only", default="", help="requests whose title contains this")
    parser.add_argument("--output", type=output_file, help="write the figures here as JSON")
    arguments = parser.parse_args()
    requests = [request for request in REQUESTS if arguments.only in request.title]
    if not requests:
        titles = "; ".join(request.title for request in REQUESTS)
        parser.error(f"--only {arguments.only}: in no title of {titles}")
    measured: dict[str, list[Measurement]] = {request.title: [] for request in requests}
    with tempfile.TemporaryDirectory() as directory:
        run_file = Path(directory) / "run.yaml"
        write_text(run_file, RUN_FILE)
        for turn in range(arguments.turns):
            for request in requests:
                found = measurement(request, run_file)
                measured[request.title].append(found)
                print(f"  turn {turn} {request.title:<34} {found.processor_s:6.2f} s", flush=True)
    report = report_of(measured)
    print_report(report)
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(report, indent=1) + "\n")


def measurement(request: Request, run_file: Path) -> Measurement:
    """Run ``sppo solve`` for a request, between two runs of the fixed computation."""
    before = loop_seconds()
    begin = children_seconds()
    subprocess.run(
        [sys.executable, "-c", _SOLVE, "solve", str(run_file), *request.words, "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    processor_s = children_seconds() - begin
    loops = [*before, *loop_seconds()]
    return Measurement(processor_s, statistics.fmean(loops), min(loops))


def children_seconds() -> float:
    """Return the processor seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def loop_seconds() -> list[float]:
    """Return the processor seconds of a computation in numpy and Python, run three times."""
    table, seconds = np.arange(200_000.0), []
    for _ in range(3):
        begin = time.process_time()
        for _ in range(120):
            np.maximum.accumulate(np.cumsum(table))
            dict(zip(range(6000), range(6000), strict=True))
        seconds.append(time.process_time() - begin)
    return seconds


def report_of(measured: Mapping[str, Sequence[Measurement]]) -> dict[str, Any]:
    """Return the figures of all requests as JSON values."""
    fastest_s = min(one.least_loop_s for turns in measured.values() for one in turns)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "command": shlex.join(["python", *sys.argv]),
        "requests": [
            {
                "request": title,
                "processor_s": statistics.median(one.processor_s for one in turns),
                "core_speed": statistics.median(fastest_s / one.loop_s for one in turns),
                "at_full_speed_s": statistics.median(
                    one.processor_s * fastest_s / one.loop_s for one in turns
                ),
                "turns": [asdict(one) for one in turns],
            }
            for title, turns in measured.items()
        ],
    }


def print_report(report: Mapping[str, Any]) -> None:
    """Print medians over the turns."""
    print(f"\n{'sppo solve':<36}{'processor':>10} {'core speed':>11} {'at full speed':>14}")
    for row in report["requests"]:
        print(
            f"{row['request']:<36}{row['processor_s']:>8.2f} s {row['core_speed']:>11.2f} "
            f"{row['at_full_speed_s']:>12.2f} s"
        )


if __name__ == "__main__":
    main()
