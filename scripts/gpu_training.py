"""Check training of a model of a billion parameters on one GPU against predictions.

Trains through ``sppo train`` with retained, offloaded and recomputed activations, and with
transformers and activation checkpointing, if it is installed. Step times, memory and copies stand
beside their predictions, which come from the rates that ``sppo bench all`` measured if their file
is given. Run by ``scripts/gpu_check.sh``. The result file has everything done so far at any time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo.config.run import DEGREES
from sppo.output_file import write_text

TEXT = ("asyncio", "email", "http", "json", "logging", "unittest")
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
"""Largest relative difference of losses with retained and offloaded activations. They may differ by
the order in which gradients of embeddings are added."""
SUMMARY_KEYS = (
    "predicted_for",
    "mfu",
    "copies",
    "memory_bytes",
    "device_peak_bytes",
    "host_peak_bytes",
)
"""Figures of a run's summary that the report repeats."""
TIME_OVER = "the time was over"
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
    policies: tuple[str, ...] = ("retain", "offload_all")
    """Activation policies of the runs on the GPU."""
    with_transformers: bool = False
    """Whether the model is also trained with transformers and activation checkpointing."""
    kv: str = "auto"
    """Value of ``activations.kv``."""
    adapter: dict[str, Any] | None = None
    """Section ``adapter`` of the runs; None to train all weights."""


@dataclass(frozen=True, slots=True)
class Place:
    """Directory of the runs, and functions that start them."""

    directory: Path
    rehearse: bool
    hardware: Path | None = None
    """Description of the machine by ``sppo bench all``; None for the rates of a preset."""

    def python(self, *words: str, timeout_s: float) -> str:
        """Return the output of a call of the Python interpreter.

        Raises:
            RuntimeError: The call failed; the message has the end of its output.
        """
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise RuntimeError(f"python {shlex.join(words)}\n{done.stdout[-_SHOWN:]}")
        return done.stdout

    def train(self, case: Case, *, policy: str, timeout_s: float) -> dict[str, Any]:
        """Train a run; return its metrics and summary."""
        name = f"{case.name}-{policy}"
        machine = "auto" if self.hardware is None else {"file": str(self.hardware)}
        moves: dict[str, Any] = {"policy": policy, "kv": case.kv}
        if self.rehearse:
            machine, moves["disk"] = {"preset": "laptop-cpu"}, str(self.directory)
        sections = {
            "model": case.model,
            "data": {"tokens": "tokens", "shuffle": False},
            "sequence": {"length": case.length, "num_subsequences": case.num_subsequences},
            "parallel": dict.fromkeys(DEGREES, 1),  # whatever else the machine has
            "activations": moves,
            "adapter": case.adapter,
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": 0, "at_end": False},
            "train": {"steps": case.steps, "dtype": case.dtype, "output": f"runs/{name}"},
            "hardware": machine,
        }
        file = self.directory / f"{name}.json"  # JSON is YAML
        write_text(file, json.dumps(sections))
        start = time.perf_counter()
        self.python("-m", "sppo", "train", file.name, timeout_s=timeout_s)
        output = self.directory / "runs" / name
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return {
            "steps": [json.loads(line) for line in lines],
            "summary": json.loads((output / "run_summary.json").read_text()),
            "process_s": time.perf_counter() - start,
        }


def cases(*, rehearse: bool, quick: bool) -> tuple[Case, ...]:
    """Return the cases, the most important first."""
    if rehearse:
        return (
            Case("rehearsal", {"preset": "tiny-test"}, 256, 4, "fp32", 2, with_transformers=True),
        )
    if quick:
        return (_dense(16384, ("retain", "offload_all"), with_transformers=True),)
    return (
        _dense(32768, ("retain", "offload_all"), with_transformers=True),
        *_models_of_today(),
        _dense(131072, ("hybrid", "keep_attention", "recompute")),  # within 128 GiB of host memory
    )


def _dense(length: int, policies: tuple[str, ...], *, with_transformers: bool = False) -> Case:
    return Case(
        f"llama-3.2-1b {length >> 10}Ki",
        {"preset": "llama-3.2-1b"},
        length,
        length // 8192,
        "bf16",
        3,
        policies=policies,
        with_transformers=with_transformers,
    )


def _models_of_today() -> tuple[Case, ...]:
    """Return cases of few layers of published shapes, and one with an adapter."""
    of_qwen = {"count": 64, "per_token": 8, "mlp_size": 768, "normalize": True}
    routed = {"preset": "qwen3-30b-a3b", "num_layers": 3, "vocab_size": 32768, "experts": of_qwen}
    of_gpt = {"count": 16, "per_token": 4, "mlp_size": 2880, "score": "softmax_chosen"}
    biases = {"bias": True, "router_bias": True}
    sinks = {"preset": "gpt-oss-20b", "num_layers": 2, "vocab_size": 32768}
    sinks["experts"] = {**of_gpt, **biases}
    windows = {"preset": "gemma-3-4b", "num_layers": 6, "vocab_size": 32768}
    linear = {"preset": "qwen3.5-4b", "num_layers": 8, "vocab_size": 32768}
    moved = ("retain", "recompute", "offload_all")
    return (
        Case("64 experts of qwen3-30b-a3b", routed, 32768, 4, "bf16", 3, moved),
        Case("16 experts of gpt-oss-20b", sinks, 32768, 4, "bf16", 3, ("retain", "offload_all")),
        Case("windows of gemma-3-4b", windows, 65536, 8, "bf16", 3, ("retain",), kv="retain"),
        Case("windows recomputed", windows, 65536, 8, "bf16", 3, ("retain",), kv="recompute"),
        Case("linear attention of qwen3.5-4b", linear, 65536, 8, "bf16", 3, moved),
        Case(
            "adapter of llama-3.2-1b",
            {"preset": "llama-3.2-1b"},
            32768,
            4,
            "bf16",
            3,
            ("retain", "offload_all"),
            adapter={"rank": 16, "alpha": 32},
        ),
    )


def compared(case: Case, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the runs of a case, and their largest difference in loss.

    Step times are medians without the first step of each run.
    """
    losses = {name: [step["loss"] for step in run["steps"]] for name, run in runs.items()}
    seconds = {name: _step_s(run) for name, run in runs.items()}
    reference = next(iter(losses.values()))
    difference = max(
        abs(a - b) / abs(a)
        for found in losses.values()
        for a, b in zip(reference, found, strict=True)
    )
    return {
        "case": case.name,
        "tokens": case.length,
        "subsequences": case.num_subsequences,
        "dtype": case.dtype,
        "largest_difference": difference,
        "within_tolerance": difference <= TOLERANCE[case.dtype],
        "runs": {
            name: {
                "losses": losses[name],
                "step_s": seconds[name],
                "over_least_step_s": seconds[name] / min(seconds.values()),
                "predicted_step_s": run["summary"]["step_s"]["predicted"],
                "process_s": run["process_s"],
                **{key: run["summary"][key] for key in SUMMARY_KEYS},
            }
            for name, run in runs.items()
        },
    }


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


def _step_s(run: dict[str, Any]) -> float:
    return float(statistics.median(step["step_s"] for step in run["steps"][1:]))


def check(place: Place, chosen: tuple[Case, ...], *, seconds: float, out: Path) -> bool:
    """Run what fits into `seconds` of the chosen cases; return whether nothing failed."""
    until = time.monotonic() + seconds
    result: dict[str, Any] = {
        "about": "measured, but for what is called predicted",
        "cases": [],
        "transformers": [],
        "failed": [],
        "left_out": [],
    }

    def left() -> float:
        return max(1.0, until - time.monotonic())

    prepare_tokens(place)
    for case in chosen:
        runs: dict[str, dict[str, Any]] = {}
        for policy in case.policies:
            try:
                runs[policy] = place.train(case, policy=policy, timeout_s=left())
            except RuntimeError as error:
                result["failed"].append({"case": case.name, "policy": policy, "why": str(error)})
            except subprocess.TimeoutExpired:
                result["left_out"].append({"case": case.name, "policy": policy, "why": TIME_OVER})
        if runs:
            result["cases"].append(compared(case, runs))
        write_text(out, json.dumps(result, indent=1) + "\n")
        if case.with_transformers:
            try:
                beside = transformers_beside(case, place, timeout_s=left())
            except RuntimeError as error:
                beside = {"case": case.name, "failed": str(error)}
            except subprocess.TimeoutExpired:
                beside = {"case": case.name, "left_out": TIME_OVER}
            result["transformers"].append(beside)
        write_text(out, json.dumps(result, indent=1) + "\n")
    return not result["failed"] and all(row["within_tolerance"] for row in result["cases"])


def prepare_tokens(place: Place) -> None:
    """Write token data from the source of the standard library, as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [str(library / name) for name in TEXT if (library / name).exists()]
    words = ("-m", "sppo", "data", "prepare", "--tokenizer", "bytes", "--glob", "*.py")
    place.python(*words, "--out", "tokens", *paths, timeout_s=60)


def main() -> int:
    """Run the check; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--directory", type=Path, required=True, help="empty; holds the runs")
    parser.add_argument(
        "--seconds", type=float, default=230.0, help="leave out what is not done by then"
    )
    parser.add_argument("--quick", action="store_true", help="a shorter sequence")
    parser.add_argument("--only", nargs="+", help="words, of which the name of a case has one")
    parser.add_argument("--hardware", type=Path, help="what sppo bench all wrote")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny runs on the CPU, to try this script itself"
    )
    options = parser.parse_args()
    machine = None if options.hardware is None else options.hardware.resolve()
    place = Place(options.directory.resolve(), options.rehearse, machine)
    chosen = cases(rehearse=options.rehearse, quick=options.quick)
    if options.only:
        chosen = tuple(own for own in chosen if any(word in own.name for word in options.only))
    good = check(place, chosen, seconds=options.seconds, out=options.out.resolve())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
