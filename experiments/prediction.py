"""Compare predicted with measured step times and memory on this machine, by phase and by bucket.

Measures the machine with ``sppo bench``, then trains several models for a few steps with ``sppo
train``, which predicts each run from the measured description before it starts, and compares both.
``--random 10`` draws models, lengths, policies, ranks and tiers. The speed of a shared machine
changes, so a fixed matrix product and attention are timed together with the measurement and with
every run.

    python -m experiments.prediction DIR --random 10 --steps 4 --output prediction.json
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import harness
from sppo.config.run import DEGREES
from sppo.output_file import write_text

PHASES = ("forward", "backward", "data and update")
_KINDS = ("predicted", "measured")
QWEN = {
    "vocab_size": 4096, "hidden_size": 320, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
    "head_size": 128, "mlp_size": 1024, "qk_norm": True,
}  # fmt: skip
GPT = {
    "vocab_size": 4096, "hidden_size": 384, "num_layers": 4, "num_heads": 6, "mlp_size": 1536,
    "mlp": "gelu_tanh", "norm": "layernorm", "position": "learned", "max_positions": 4096,
    "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tie_embeddings": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"preset": "tiny"},
    "llama-like": harness.MODEL,
    "qwen3-like": QWEN,
    "gpt-like": GPT,
}
_SMALL = 0.01
"""Share of all memory below which the deviation of a bucket is not reported."""
_SPEED = (
    "import time, torch; from torch.nn.functional import scaled_dot_product_attention as f\n"
    "x, w = (torch.randn(s) for s in ((1024, 512), (512, 1792)))\n"
    "q = torch.randn(1, 8, 1024, 64); times = []\n"
    "for _ in range(60):\n"
    "    begin = time.perf_counter(); x @ w; x @ w; f(q, q, q, is_causal=True)\n"
    "    times.append(time.perf_counter() - begin)\n"
    "print(1 / sorted(times)[30])"
)
"""Program that prints the rate of a fixed set of matrix products and attention, per second. In
fp32: without instructions for bf16, torch's own bf16 products are a hundred times slower."""


@dataclass(frozen=True, slots=True)
class Case:
    """Training run whose step is predicted."""

    name: str
    length: int
    num_subsequences: int
    dtype: str = "bf16"
    policy: str = "retain"
    pipeline_ranks: int = 1
    disk: bool = False
    """Whether activations may be offloaded to a directory beside the run."""
    sequences: int = 1
    partition: str = "flops"
    multiplexed: str = "auto"

    @property
    def title(self) -> str:
        """Description in one line."""
        words = [self.name, f"{self.length}", f"N {self.num_subsequences}", self.dtype, self.policy]
        words += [f"PP {self.pipeline_ranks}"] * (self.pipeline_ranks > 1)
        words += ["MSP"] * (self.pipeline_ranks > 1 and self.multiplexed == "on")
        words += ["disk"] * self.disk + [f"x {self.sequences}"] * (self.sequences > 1)
        return " ".join(words)


CASES = (
    Case("tiny", 16384, 8),
    Case("llama-like", 8192, 4),
    Case("llama-like", 8192, 4, policy="keep_attention"),
    Case("qwen3-like", 4096, 2, dtype="fp32"),
    Case("gpt-like", 4096, 2),
    Case("llama-like", 8192, 4, policy="offload_all", pipeline_ranks=2, disk=True),
)


def random_cases(count: int, *, seed: int) -> list[Case]:
    """Draw `count` random runs that two cores of one machine can train."""
    dice = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        name = dice.choice(list(MODELS))
        ranks, disk = dice.choice([1, 1, 2]), dice.random() < 0.4
        offloading = ["offload_all", "sppo", "hybrid"] if disk else []
        cases.append(
            Case(
                name,
                length=128 * dice.randint(16, 32 if name == "gpt-like" else 64),
                num_subsequences=dice.choice([1, 2, 4, 5]) if ranks == 1 else dice.choice([4, 6]),
                dtype=dice.choice(["bf16", "bf16", "fp32"]),
                policy=dice.choice(["retain", "keep_attention", "recompute", *offloading * 2]),
                pipeline_ranks=ranks,
                disk=disk,
                sequences=dice.choice([1, 1, 2]),
                partition=dice.choice(["flops", "length"]),
                multiplexed=dice.choice(["off", "on"]) if ranks > 1 else "off",
            )
        )
    return cases


def main() -> None:
    """Measure the machine, train every case, and print the comparison."""
    parser = harness.parser(__doc__)
    parser.add_argument("directory", type=Path, help="where data, runs and results go")
    parser.add_argument("--hardware", type=Path, help="a description to use instead of measuring")
    parser.add_argument("--steps", type=harness.positive, default=7, help="medians count")
    parser.add_argument("--random", type=int, default=0, help="draw so many cases instead")
    parser.add_argument("--seed", type=int, default=0, help="of the cases that are drawn")
    parser.add_argument("--only", default="", help="cases whose title contains this")
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    hardware = options.hardware or directory / "hardware.json"
    if options.hardware is None:
        harness.sppo("bench", "all", "-o", hardware)
    speed_then = machine_speed()
    harness.prepare_tokens(directory / "tokens")
    rows = []
    for case in random_cases(options.random, seed=options.seed) or CASES:
        if options.only in case.title:
            before = machine_speed()
            found = train(case, directory, steps=options.steps, hardware=hardware.absolute())
            speed = (before + machine_speed()) / 2 / speed_then
            rows.append({"case": case.title, "machine_speed": speed, **found})
            print(f"  trained: {case.title}", flush=True)
    print_rows(rows)
    print_deviations(rows)
    harness.write_report(options.output, {**harness.header(), "cases": rows})


def machine_speed() -> float:
    """Return the rate of a fixed computation on all cores, per second."""
    said = subprocess.run(
        [sys.executable, "-c", _SPEED], check=True, capture_output=True, text=True
    )
    return float(said.stdout)


def run_keys(case: Case, directory: Path, *, steps: int, hardware: Path) -> dict[str, Any]:
    """Return the run file of a case."""
    activations: dict[str, Any] = {"policy": case.policy}
    if case.disk:
        activations |= {"disk": str(directory / "disk"), "tier": "disk"}
    parallel: dict[str, Any] = {
        **dict.fromkeys(DEGREES, 1),
        "pipeline_parallel_degree": case.pipeline_ranks,
    }
    if case.pipeline_ranks > 1:
        parallel["multiplexed"] = case.multiplexed
    return {
        "model": MODELS[case.name],
        "data": {"tokens": str(directory / "tokens")},
        "sequence": {
            "length": case.length,
            "num_subsequences": case.num_subsequences,
            "partition": case.partition,
        },
        "parallel": parallel,
        "activations": activations,
        "hardware": {"file": str(hardware)},
        "train": {
            "steps": steps,
            "dtype": case.dtype,
            "sequences_per_step": case.sequences,
            "output": str(directory / f"run_{time.time_ns()}"),
        },
    }


def train(case: Case, directory: Path, *, steps: int, hardware: Path) -> dict[str, Any]:
    """Train a run; return predicted and median measured seconds by phase, and bytes by bucket."""
    keys = run_keys(case, directory, steps=steps, hardware=hardware)
    if case.disk:
        (directory / "disk").mkdir(exist_ok=True)
    write_text(directory / "run.yaml", json.dumps(keys))  # JSON is YAML
    harness.sppo("train", directory / "run.yaml")
    summary = json.loads((Path(keys["train"]["output"]) / "run_summary.json").read_text())
    return {key: summary[key] for key in ("phases_s", "memory_bytes", "timeline")}


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the deviation of the prediction of each phase, the step, and all memory."""
    harness.print_table(
        ("predicted, measured", *PHASES, "step", "memory"),
        [
            (
                row["case"],
                *(_pair(_seconds(row, [phase])) for phase in PHASES),
                _pair(_seconds(row, PHASES)),
                _pair([row["memory_bytes"]["all"][kind] / 2**20 for kind in _KINDS], "MiB"),
            )
            for row in rows
        ],
    )


def _seconds(row: Mapping[str, Any], phases: Sequence[str]) -> list[float]:
    """Return the predicted and the measured seconds of some phases."""
    return [sum(row["phases_s"][name][kind] for name in phases) for kind in _KINDS]


def _pair(pair: Sequence[float], unit: str = "s") -> str:
    """Return predicted and measured amounts, and the deviation."""
    predicted, measured = pair
    return f"{predicted:.3g} {measured:.3g} {unit} {predicted / measured - 1:+.1%}"


def print_deviations(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the median and the largest deviation of step times, and the largest of memory."""
    steps = [_seconds(row, PHASES) for row in rows]
    off = [abs(predicted / measured - 1) for predicted, measured in steps]
    at_speed = [
        abs(predicted / row["machine_speed"] / measured - 1)
        for row, (predicted, measured) in zip(rows, steps, strict=True)
    ]
    for name, apart in (("as measured", off), ("at the machine's speed beside each run", at_speed)):
        print(
            f"step time, {name}: off by {statistics.median(apart):.1%}, at worst {max(apart):.1%}"
        )
    buckets: dict[str, list[float]] = {}
    for row in rows:
        whole = row["memory_bytes"]["all"]["measured"]
        for name, pair in row["memory_bytes"].items():
            difference = abs(pair["predicted"] - pair["measured"])
            if difference > _SMALL * whole:
                buckets.setdefault(name, []).append(difference / max(pair["measured"], 1))
    for name, apart in buckets.items():
        print(f"{name}: off by up to {max(apart):.1%} in {len(apart)} of {len(rows)} runs")


if __name__ == "__main__":
    main()
