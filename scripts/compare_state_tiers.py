"""Compare training with its state in memory and on a disk, on the CPU.

Every turn continues both trainings by one step, each in a separate ``sppo train`` process; the
first turn is not counted. Losses must be equal to the last bit. The tokens are the source of
Python's standard library.

    python scripts/compare_state_tiers.py DIR --output docs/results/compare_state_tiers.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import sysconfig
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from option_types import output_file, positive

from sppo.output_file import write_text

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 2,
    "mlp_size": 1792,
}
"""Llama-shaped model of the README."""
SIDES = {
    "in memory": {},
    "on a disk": {"weights": "disk", "gradients": "disk", "optimizer": "disk"},
}
MOVED = ("weights", "gradients", "optimizer")


def main() -> None:
    """Prepare tokens, continue both trainings in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "directory", type=Path, help="for tokens, runs and the tier; made if missing"
    )
    parser.add_argument("--length", type=positive, default=16384, help="tokens of the sequence")
    parser.add_argument("--turns", type=positive, default=3, help="counted turns")
    parser.add_argument("--output", type=output_file, help="write the figures here as JSON")
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    (directory / "tier").mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()
    _prepare(directory, tokens=4 * arguments.length)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(arguments.turns + 1):
        for side, state in SIDES.items():
            _go_on(directory, side, state, steps=turn + 1, length=arguments.length)
            step = _steps(directory, side)[-1]
            print(f"  turn {turn}, {side:<10} {step['step_s']:8.2f} s", flush=True)
            if turn:
                seconds[side].append(step["step_s"])
    report = _report(directory, seconds)
    rows = report["sides"]
    for side, row in rows.items():
        held = ", ".join(f"{name} {row[name] / 2**20:.1f} MiB" for name in (*MOVED, "all"))
        print(f"{side}: step {row['step_s']:.2f} s, {held}")
    time, memory = report["step_ratio"], report["memory_ratio"]
    print(f"on a disk: {time:.3f}x the time, {memory:.3f}x the memory")
    if not report["losses_equal"]:
        sys.exit("error: the losses differ")
    if arguments.output is not None:
        how = {
            "provenance": "measured",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load_before": load_before,
            "torch": version("torch"),
            "command": shlex.join(["python", *sys.argv]),
            "length": arguments.length,
            "turns": arguments.turns,
            "model": MODEL,
        }
        write_text(arguments.output, json.dumps({**how, **report}, indent=1) + "\n")


def _sppo(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sppo", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"error: sppo {shlex.join(words)}: {done.stderr[-2000:]}")


def _prepare(directory: Path, *, tokens: int) -> None:
    """Write token data of at least `tokens` bytes."""
    if (directory / "tokens").exists():
        return
    library, files, size = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for file in sorted(library.glob("*.py")):
        files.append(str(file))
        size += file.stat().st_size
        if size > 2 * tokens:
            break
    _sppo("data", "prepare", "--tokenizer", "bytes", "--out", str(directory / "tokens"), *files)


def _go_on(directory: Path, side: str, state: dict[str, str], *, steps: int, length: int) -> None:
    """Train until `steps` steps are done."""
    name = side.replace(" ", "_")
    run = {
        "model": MODEL,
        "data": {"tokens": str(directory / "tokens")},
        "sequence": {"length": length, "num_subsequences": 8},
        "parallel": {"virtual_stages": MODEL["num_layers"], "schedule": "looped_bfs"},
        "activations": {
            "policy": "keep_attention",
            "kv": "recompute",
            "disk": str(directory / "tier"),
        },
        "optimizer": {"schedule": "constant", "lr": 1e-4},
        "state": state or dict.fromkeys(MOVED, "device"),
        "train": {"steps": steps, "output": str(directory / name)},
    }
    write_text(directory / f"{name}.yaml", json.dumps(run))
    _sppo("train", str(directory / f"{name}.yaml"))


def _steps(directory: Path, side: str) -> list[dict[str, Any]]:
    metrics = directory / side.replace(" ", "_") / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _report(directory: Path, seconds: dict[str, list[float]]) -> dict[str, Any]:
    sides = {}
    for side, took in seconds.items():
        summary = json.loads((directory / side.replace(" ", "_") / "run_summary.json").read_text())
        buckets = summary["memory_bytes"]
        sides[side] = {
            "step_s": statistics.median(took),
            "steps_s": took,
            **{name: buckets[name]["measured"] for name in (*MOVED, "all")},
            "all_predicted": buckets["all"]["predicted"],
        }
    here, there = sides.values()
    losses = [[(s["loss"], s["grad_norm"]) for s in _steps(directory, side)] for side in SIDES]
    return {
        "sides": sides,
        "step_ratio": statistics.median(
            after / before for before, after in zip(*seconds.values(), strict=True)
        ),
        "memory_ratio": there["all"] / here["all"],
        "losses_equal": losses[0] == losses[1],
    }


if __name__ == "__main__":
    main()
