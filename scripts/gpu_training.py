"""Check training on one GPU: losses against a CPU, memory against predictions, and offload.

The first step is also timed with CUDA's kernels loaded lazily, at their first launch, and eagerly.

Trains small models on the CPU and on the GPU, with retained and with offloaded activations, and a
model of a billion parameters with both, all through ``sppo train``; the latter also with
transformers and activation checkpointing, if it is installed. Run by ``scripts/gpu_check.sh``. The
result file has everything done so far at any time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo.config.run import DEGREES
from sppo.output_file import write_text

TEXT = ("asyncio", "email", "http", "json", "logging", "unittest")
LLAMA = {
    "vocab_size": 512, "hidden_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2,
    "mlp_size": 1792,
}  # fmt: skip
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
"""Largest relative difference of losses between devices. Losses with offloading on one device may
differ by the order in which gradients of embeddings are added."""
_SHOWN = 2000


@dataclass(frozen=True, slots=True)
class Case:
    """Model that is trained in several runs."""

    name: str
    model: dict[str, Any]
    length: int
    num_subsequences: int
    dtype: str
    steps: int
    on_cpu: bool = True
    """Whether the model is also trained on the CPU."""
    policies: tuple[str, ...] = ("retain", "offload_all")
    """Activation policies of the runs on the GPU."""
    with_transformers: bool = False
    """Whether the model is also trained with transformers and activation checkpointing."""


@dataclass(frozen=True, slots=True)
class Place:
    """Directory of the runs, and functions that start them."""

    directory: Path
    rehearse: bool

    def sppo(self, *words: str, timeout_s: float, **variables: str) -> str:
        """Return the output of a command of ``sppo``, with more environment variables.

        Raises:
            RuntimeError: The command failed; the message has the end of its output.
        """
        return self.python("-m", "sppo", *words, timeout_s=timeout_s, **variables)

    def python(self, *words: str, timeout_s: float, **variables: str) -> str:
        """Return the output of a call of the Python interpreter.

        Raises:
            RuntimeError: The call failed; the message has the end of its output.
        """
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.directory,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise RuntimeError(f"python {shlex.join(words)}\n{done.stdout[-_SHOWN:]}")
        return done.stdout

    def train(
        self, case: Case, *, policy: str, device: str, timeout_s: float, **variables: str
    ) -> dict[str, Any]:
        """Train a run, with more environment variables; return its metrics and summary."""
        name = "-".join((case.name, policy, device, *variables.values()))
        moves: dict[str, Any] = {"policy": policy}
        if self.rehearse:
            moves["disk"] = str(self.directory)
        sections = {
            "model": case.model,
            "data": {"tokens": "tokens", "shuffle": False},
            "sequence": {"length": case.length, "num_subsequences": case.num_subsequences},
            "parallel": dict.fromkeys(DEGREES, 1),  # whatever else the machine has
            "activations": moves,
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": 0, "at_end": False},
            "train": {"steps": case.steps, "dtype": case.dtype, "output": f"runs/{name}"},
            "hardware": {"preset": "laptop-cpu"} if device == "cpu" else "auto",
        }
        file = self.directory / f"{name}.json"  # JSON is YAML
        write_text(file, json.dumps(sections))
        start = time.perf_counter()
        self.sppo("train", file.name, timeout_s=timeout_s, **variables)
        output = self.directory / "runs" / name
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return {
            "steps": [json.loads(line) for line in lines],
            "summary": json.loads((output / "run_summary.json").read_text()),
            "process_s": time.perf_counter() - start,
        }


def cases(*, rehearse: bool, quick: bool) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Return the cases to compare with the CPU and the cases to time, the most important first."""
    if rehearse:
        return (), (
            Case("rehearsal", {"preset": "tiny-test"}, 256, 4, "fp32", 2, with_transformers=True),
        )
    compared = (
        Case("tiny", {"preset": "tiny"}, 4096, 4, "fp32", 4),
        Case("llama-4-layers", LLAMA, 4096, 4, "bf16", 4),
    )
    policies = ("retain", "offload_all", "sppo", "recompute")
    lengths = {16384: policies[:2]} if quick else {65536: policies, 131072: policies[1:]}
    timed = tuple(
        Case(
            f"llama-3.2-1b {length >> 10}Ki",
            {"preset": "llama-3.2-1b"},
            length,
            length // 8192,
            "bf16",
            3,
            on_cpu=False,
            policies=of_length,
            with_transformers=length == min(lengths),
        )
        for length, of_length in lengths.items()
    )
    return compared, timed


def losses_beside(case: Case, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the losses of the runs of a case, and their largest difference."""
    losses = {name: [step["loss"] for step in run["steps"]] for name, run in runs.items()}
    found: dict[str, Any] = {"case": case.name, "dtype": case.dtype, "losses": losses}
    pairs = {"cpu and gpu": ("cpu retain", "gpu retain")} if case.on_cpu else {}
    if "retain" in case.policies:
        pairs["retained and offloaded"] = ("gpu retain", "gpu offload_all")
    found["largest_difference"] = {
        what: max(
            (abs(a - b) / abs(a) for a, b in zip(losses[one], losses[other], strict=True)),
            default=math.inf,
        )
        for what, (one, other) in pairs.items()
    }
    if "retain" in case.policies:
        found["same_bits_offloaded"] = losses["gpu retain"] == losses["gpu offload_all"]
    found["within_tolerance"] = all(
        difference <= TOLERANCE[case.dtype] for difference in found["largest_difference"].values()
    )
    return found


def memory_beside(case: Case, runs: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield predicted and measured memory by bucket of the runs on the GPU."""
    for name, run in runs.items():
        if name.startswith("gpu"):
            summary = run["summary"]
            yield {
                "case": case.name,
                "run": name,
                "predicted_for": summary["predicted_for"],
                "device_peak_bytes": summary["device_peak_bytes"],
                "host_peak_bytes": summary["host_peak_bytes"],
                "memory_bytes": summary["memory_bytes"],
            }


def times_beside(case: Case, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return step times by policy, without the first step of each run."""
    offloaded = runs["gpu offload_all"]
    seconds = {name: _step_s(run) for name, run in runs.items()}
    found = {
        "case": case.name,
        "tokens": case.length,
        "subsequences": case.num_subsequences,
        "step_s": seconds,
        "mfu": {name: run["summary"]["mfu"] for name, run in runs.items()},
        "device_peak_bytes": {
            name: run["summary"]["device_peak_bytes"] for name, run in runs.items()
        },
        "predicted_step_s": {
            name: run["summary"]["step_s"]["predicted"] for name, run in runs.items()
        },
        "copies": offloaded["summary"]["copies"],
        "process_s": {name: run["process_s"] for name, run in runs.items()},
    }
    if "gpu retain" in seconds:
        found["step_time_ratio"] = seconds["gpu offload_all"] / seconds["gpu retain"]
    return found


def transformers_beside(case: Case, place: Place, *, timeout_s: float) -> dict[str, Any]:
    """Return the figures of a case with transformers, or the reason why it was left out.

    Raises:
        RuntimeError: The training failed, e.g. for lack of memory.
        subprocess.TimeoutExpired: The time was too short.
    """
    if importlib.util.find_spec("transformers") is None:
        reason = f"transformers is not installed for {sys.executable}"
        print(f"{case.name} with transformers: left out, {reason}", flush=True)
        return {"case": case.name, "left_out": reason}
    script = Path(__file__).with_name("transformers_training.py")
    words = (case.model["preset"], "--tokens", "tokens", "--length", str(case.length))
    output = place.python(str(script), *words, "--steps", str(case.steps), timeout_s=timeout_s)
    found = json.loads(output.splitlines()[-1])
    seconds = statistics.median(found["step_s"][1:])
    return {"case": case.name, **found, "step_s": seconds}


def first_steps(case: Case, place: Place, *, timeout_s: float) -> list[dict[str, Any]]:
    """Return the times of the first step and of the whole process, by the way to load kernels.

    Raises:
        RuntimeError: The training failed.
        subprocess.TimeoutExpired: The time was too short.
    """
    device = "cpu" if place.rehearse else "gpu"
    found = []
    for loading in ("LAZY", "EAGER"):
        variables = {"CUDA_MODULE_LOADING": loading}
        run = place.train(case, policy="retain", device=device, timeout_s=timeout_s, **variables)
        found.append(
            {
                "case": case.name,
                "loading": loading,
                "first_step_s": run["steps"][0]["step_s"],
                "later_step_s": _step_s(run),
                "process_s": run["process_s"],
                "device_peak_bytes": run["summary"]["device_peak_bytes"],
            }
        )
    return found


def _step_s(run: dict[str, Any]) -> float:
    return float(statistics.median(step["step_s"] for step in run["steps"][1:]))


def check(place: Place, *, quick: bool, seconds: float, out: Path) -> bool:
    """Run everything within `seconds`; return whether all of it succeeded."""
    until = time.monotonic() + seconds
    result: dict[str, Any] = {
        "about": "measured, but for what is called predicted",
        "command": shlex.join(["python", *sys.argv]),
        "losses": [],
        "memory": [],
        "times": [],
        "transformers": [],
        "first_step": [],
        "failed": [],
    }

    def left() -> float:
        return max(1.0, until - time.monotonic())

    def run_case(case: Case) -> dict[str, dict[str, Any]]:
        device = "cpu" if place.rehearse else "gpu"
        runs = {}
        if case.on_cpu:
            runs["cpu retain"] = place.train(case, policy="retain", device="cpu", timeout_s=left())
        for policy in case.policies:
            runs[f"gpu {policy}"] = place.train(
                case, policy=policy, device=device, timeout_s=left()
            )
        return runs

    compared, timed = cases(rehearse=place.rehearse, quick=quick)
    prepare_tokens(place)
    failures = (RuntimeError, subprocess.TimeoutExpired)
    try:
        result["first_step"] = first_steps((*compared, *timed)[0], place, timeout_s=left())
    except failures as error:
        result["failed"].append({"case": "first step", "why": str(error)})
    for case in (*compared, *timed):
        try:
            runs = run_case(case)
        except failures as error:
            result["failed"].append({"case": case.name, "why": str(error)})
        else:
            result["losses"].append(losses_beside(case, runs))
            result["memory"].extend(memory_beside(case, runs))
            if case in timed:
                result["times"].append(times_beside(case, runs))
        if case.with_transformers:
            try:
                beside = transformers_beside(case, place, timeout_s=left())
            except failures as error:
                beside = {"case": case.name, "failed": str(error)}
            result["transformers"].append(beside)
        write_text(out, json.dumps(result, indent=1) + "\n")
    return not result["failed"] and all(row["within_tolerance"] for row in result["losses"])


def prepare_tokens(place: Place) -> None:
    """Write token data from the source of the standard library, as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [str(library / name) for name in TEXT if (library / name).exists()]
    words = ("data", "prepare", "--tokenizer", "bytes", "--glob", "*.py", "--out", "tokens")
    place.sppo(*words, *paths, timeout_s=60)


def main() -> int:
    """Run the check; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--directory", type=Path, required=True, help="empty; holds the runs")
    parser.add_argument("--seconds", type=float, default=230.0, help="begin nothing after that")
    parser.add_argument("--quick", action="store_true", help="a shorter sequence")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny runs on the CPU, to try this script itself"
    )
    options = parser.parse_args()
    place = Place(options.directory.resolve(), options.rehearse)
    good = check(place, quick=options.quick, seconds=options.seconds, out=options.out.resolve())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
