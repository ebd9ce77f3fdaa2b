"""Compare training with its state in memory and on a disk, on the CPU.

Every turn continues both trainings by one step, each in a separate ``sppo train`` process; the
first turn is not counted. Losses must be equal to the last bit. The tokens are the source of
Python's standard library.

    python -m experiments.state_tiers DIR --output docs/results/compare_state_tiers.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from experiments import harness
from sppo.output_file import write_text

MOVED = ("weights", "gradients", "optimizer")
SIDES = {"in memory": "device", "on a disk": "disk"}
"""Tiers of the whole state by side."""


def main() -> None:
    """Prepare tokens, continue both trainings in turns, report."""
    parser = harness.parser(__doc__)
    parser.add_argument("directory", type=Path, help="for tokens, runs and the tier")
    parser.add_argument("--length", type=harness.positive, default=16384, help="of the sequence")
    parser.add_argument("--turns", type=harness.positive, default=3, help="that are counted")
    options = parser.parse_args()
    directory = options.directory.resolve()
    (directory / "tier").mkdir(parents=True, exist_ok=True)
    harness.prepare_tokens(directory / "tokens")
    for turn in range(options.turns + 1):
        for side in SIDES:
            _continue(directory, side, steps=turn + 1, length=options.length)
            step_s = _steps(directory, side)[-1]["step_s"]
            print(f"  turn {turn} {side:<10} {step_s:8.2f} s", flush=True)
    found = figures(directory)
    harness.print_table(
        ("state", "step", *MOVED, "all of the process"),
        [
            (
                side,
                f"{row['step_s']:.2f} s",
                *(f"{row[bucket] / 2**20:.1f} MiB" for bucket in (*MOVED, "all")),
            )
            for side, row in found["sides"].items()
        ],
    )
    print(f"on a disk: {found['step_ratio']:.3f}x time, {found['memory_ratio']:.3f}x memory")
    if not found["losses_equal"]:
        sys.exit("error: the losses differ")
    about = {"length": options.length, "model": harness.MODEL}
    harness.write_report(options.output, {**harness.header(), **about, **found})


def _continue(directory: Path, side: str, *, steps: int, length: int) -> None:
    """Train until `steps` steps are done."""
    run = {
        "model": harness.MODEL,
        "data": {"tokens": str(directory / "tokens")},
        "sequence": {"length": length, "num_subsequences": 8},
        "parallel": {"virtual_stages": harness.MODEL["num_layers"], "schedule": "looped_bfs"},
        "activations": {
            "policy": "keep_attention",
            "kv": "recompute",
            "disk": str(directory / "tier"),
        },
        "optimizer": {"schedule": "constant", "lr": 1e-4},
        "state": dict.fromkeys(MOVED, SIDES[side]),
        "train": {"steps": steps, "output": str(directory / side)},
    }
    file = directory / f"{side}.yaml"
    write_text(file, json.dumps(run))  # JSON is YAML
    harness.sppo("train", file)


def _steps(directory: Path, side: str) -> list[dict[str, Any]]:
    """Return the metrics of all steps of a side."""
    lines = (directory / side / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def figures(directory: Path) -> dict[str, Any]:
    """Return the figures of both sides, and how they compare."""
    sides = {}
    for side in SIDES:
        seconds = [step["step_s"] for step in _steps(directory, side)[1:]]
        buckets = json.loads((directory / side / "run_summary.json").read_text())["memory_bytes"]
        sides[side] = {
            "step_s": statistics.median(seconds),
            "steps_s": seconds,
            **{name: buckets[name]["measured"] for name in (*MOVED, "all")},
            "all_predicted": buckets["all"]["predicted"],
        }
    here, there = sides.values()
    losses = [[(s["loss"], s["grad_norm"]) for s in _steps(directory, side)] for side in SIDES]
    return {
        "sides": sides,
        "step_ratio": statistics.median(
            after / before for before, after in zip(here["steps_s"], there["steps_s"], strict=True)
        ),
        "memory_ratio": there["all"] / here["all"],
        "losses_equal": losses[0] == losses[1],
    }


if __name__ == "__main__":
    main()
