"""Measure how long ``sppo solve`` takes, in processor seconds of the whole command.

The requests take turns. The speed of shared machines changes, so a fixed computation runs before
and after each command; its fastest time over all turns, divided by its mean time around a command,
is the speed of the core at that command, 1 at most.

    python -m experiments.solve_seconds --turns 5 --output docs/results/solve_seconds.json
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import harness
from sppo.output_file import write_text


class Request(NamedTuple):
    """Model on a number of nodes of eight devices, one sequence a step."""

    model: str
    length: str
    hardware: str
    nodes: int

    @property
    def title(self) -> str:
        """Model, length, and number and kind of devices."""
        return f"{self.model} {self.length}, {8 * self.nodes} {self.hardware}"


REQUESTS = (
    Request("llama-3.1-70b", "4Mi", "h100", 128),
    Request("gpt-65b", "4Mi", "a100-80g", 128),
    Request("gpt-7b", "4Mi", "a100-80g", 16),
    Request("gpt-7b", "1Mi", "a100-80g", 4),
    Request("llama-3.1-8b", "1Mi", "h100", 1),
)
RUN_FILE = "{model: {preset: tiny}, data: {tokens: none}, sequence: {length: 4Ki}}\n"


def main() -> None:
    """Measure the requests in turns, report."""
    parser = harness.parser(__doc__)
    parser.add_argument("--turns", type=harness.positive, default=5)
    parser.add_argument("--only", default="", help="requests whose title contains this")
    options = parser.parse_args()
    requests = [request for request in REQUESTS if options.only in request.title]
    if not requests:
        titles = "; ".join(request.title for request in REQUESTS)
        parser.error(f"--only {options.only}: in no title of {titles}")
    measured: dict[str, list[dict[str, float]]] = {request.title: [] for request in requests}
    with tempfile.TemporaryDirectory() as directory:
        run_file = Path(directory) / "run.yaml"
        write_text(run_file, RUN_FILE)
        for turn in range(options.turns):
            for request in requests:
                found = measurement(request, run_file)
                measured[request.title].append(found)
                print(
                    f"  turn {turn} {request.title:<34} {found['processor_s']:6.2f} s", flush=True
                )
    rows = figures(measured)
    harness.print_table(
        ("sppo solve", "processor", "core speed", "at full speed"),
        [
            (
                row["request"],
                f"{row['processor_s']:.2f} s",
                f"{row['core_speed']:.2f}",
                f"{row['at_full_speed_s']:.2f} s",
            )
            for row in rows
        ],
    )
    harness.write_report(options.output, {**harness.header(), "requests": rows})


def measurement(request: Request, run_file: Path) -> dict[str, float]:
    """Return the processor seconds of a command, Python's start included, and of a fixed loop.

    The loop runs before and after the command: its mean and its least time.
    """
    keys = (
        f"model.preset={request.model}",
        f"sequence.length={request.length}",
        f"hardware.preset={request.hardware}",
        f"hardware.nodes={request.nodes}",
    )
    loops = loop_seconds()
    begin_s = children_seconds()
    harness.sppo("solve", run_file, *keys, "--json")
    processor_s = children_seconds() - begin_s
    loops += loop_seconds()
    return {
        "processor_s": processor_s,
        "loop_s": statistics.fmean(loops),
        "least_loop_s": min(loops),
    }


def children_seconds() -> float:
    """Return the processor seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def loop_seconds() -> list[float]:
    """Return the processor seconds of a computation in numpy and Python, run three times."""
    table, seconds = np.arange(200_000.0), []
    for _ in range(3):
        begin_s = time.process_time()
        for _ in range(120):
            np.maximum.accumulate(np.cumsum(table))
            dict(zip(range(6000), range(6000), strict=True))
        seconds.append(time.process_time() - begin_s)
    return seconds


def figures(measured: Mapping[str, Sequence[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return the medians of each request over its turns."""
    fastest_s = min(turn["least_loop_s"] for turns in measured.values() for turn in turns)
    return [
        {
            "request": title,
            "processor_s": statistics.median(turn["processor_s"] for turn in turns),
            "core_speed": statistics.median(fastest_s / turn["loop_s"] for turn in turns),
            "at_full_speed_s": statistics.median(
                turn["processor_s"] * fastest_s / turn["loop_s"] for turn in turns
            ),
            "turns": turns,
        }
        for title, turns in measured.items()
    ]


if __name__ == "__main__":
    main()
