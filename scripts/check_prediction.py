"""Compare predicted with measured step times and memory on this machine, by phase and by bucket.

Measures the machine with ``sppo bench``, then trains several models for a few steps with ``sppo
train``, which predicts each run from the measured description before it starts, and compares both.
``--random 10`` draws models, lengths, policies, ranks and tiers. The speed of a shared machine
changes, so a fixed matrix product and attention are timed together with the measurement and with
every run. Run by ``scripts/check_prediction.sh``.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from option_types import output_file

from sppo.config.run import DEGREES
from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import read_hardware
from sppo.output_file import write_text

PHASES = ("forward", "backward", "data and update")
LLAMA = {
    "vocab_size": 4096, "hidden_size": 512, "num_layers": 6, "num_heads": 8, "num_kv_heads": 2,
    "mlp_size": 1792,
}  # fmt: skip
QWEN = {
    "vocab_size": 4096, "hidden_size": 320, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
    "head_size": 128, "mlp_size": 1024, "qk_norm": True,
}  # fmt: skip
GPT = {
    "vocab_size": 4096, "hidden_size": 384, "num_layers": 4, "num_heads": 6, "mlp_size": 1536,
    "mlp": "gelu_tanh", "norm": "layernorm", "position": "learned", "max_positions": 4096,
    "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tie_embeddings": True,
}  # fmt: skip


_SMALL = 0.01
"""Share of all memory below which the deviation of a bucket is not reported."""


@dataclass(frozen=True, slots=True)
class Case:
    """Training run whose step is predicted."""

    name: str
    model: dict[str, Any]
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


CASES = (
    Case("tiny (quickstart)", {"preset": "tiny"}, 16384, 8),
    Case("llama-like", LLAMA, 8192, 4),
    Case("llama-like", LLAMA, 8192, 4, policy="keep_attention"),
    Case("qwen3-like", QWEN, 4096, 2, dtype="fp32"),
    Case("gpt-like", GPT, 4096, 2),
    Case("two ranks, disk", LLAMA, 8192, 4, policy="offload_all", pipeline_ranks=2, disk=True),
)


def random_cases(count: int, *, seed: int) -> list[Case]:
    """Draw `count` random runs that two cores of one machine can train."""
    dice = random.Random(seed)
    models: dict[str, dict[str, Any]] = {
        "tiny": {"preset": "tiny"},
        "llama-like": LLAMA,
        "qwen3-like": QWEN,
        "gpt-like": GPT,
    }
    cases: list[Case] = []
    while len(cases) < count:
        name = dice.choice(list(models))
        ranks, disk = dice.choice([1, 1, 2]), dice.random() < 0.4
        offloading = ["offload_all", "sppo", "hybrid"] if disk else []
        cases.append(
            Case(
                name,
                models[name],
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where data, runs and results go")
    parser.add_argument("--hardware", type=Path, help="a description to use instead of measuring")
    parser.add_argument("--steps", type=int, default=7, help="steps of each run; medians count")
    parser.add_argument("--random", type=int, default=0, help="draw so many cases instead")
    parser.add_argument("--seed", type=int, default=0, help="of the cases that are drawn")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--output", type=output_file, help="write the comparison here as JSON")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    hardware_file = arguments.hardware or directory / "hardware.json"
    if arguments.hardware is None:
        sppo("bench", "all", "-o", str(hardware_file), cwd=Path.cwd())
    hardware = read_hardware(hardware_file)
    speed_then = machine_speed()
    prepare_tokens(directory / "tokens")
    rows = []
    drawn = random_cases(arguments.random, seed=arguments.seed)
    for index, case in enumerate(drawn or CASES):
        if arguments.only in case.name:
            run_file = directory / f"case_{index}.yaml"
            write_run(case, run_file, steps=arguments.steps, hardware=hardware_file.absolute())
            before = machine_speed()
            found = train(run_file, directory)
            speed = (before + machine_speed()) / 2 / speed_then
            rows.append({"case": title(case), "machine_speed": speed, **found})
            print_rows(rows[-1:])
    print(f"\n{hardware.name}, {hardware.provenance}")
    print_rows(rows)
    print_memory(rows)
    print_idle(rows)
    print_deviations(rows)
    if arguments.output is not None:
        write_report(arguments.output, rows, hardware)


def sppo(*words: str, cwd: Path) -> None:
    """Run a command of this installation; its output is passed through."""
    code = "from sppo.__main__ import main; main()"
    subprocess.run([sys.executable, "-c", code, *words], check=True, cwd=cwd)


def machine_speed() -> float:
    """Return the rate of a fixed set of matrix products and attention on all cores, per second.

    In fp32: without instructions for bf16, torch's own bf16 products are a hundred times slower.
    """
    code = (
        "import time, torch; from torch.nn.functional import scaled_dot_product_attention as f\n"
        "x, w = (torch.randn(s) for s in ((1024, 512), (512, 1792)))\n"
        "q = torch.randn(1, 8, 1024, 64); times = []\n"
        "for _ in range(60):\n"
        "    begin = time.perf_counter(); x @ w; x @ w; f(q, q, q, is_causal=True)\n"
        "    times.append(time.perf_counter() - begin)\n"
        "print(1 / sorted(times)[30])"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(said.stdout)


def prepare_tokens(tokens: Path) -> None:
    """Write token data from the source of Python's standard library, as bytes."""
    if tokens.exists():
        return
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [str(library / name) for name in ("asyncio", "email", "http", "json", "unittest")]
    options = ("--tokenizer", "bytes", "--glob", "*.py", "--out", str(tokens.absolute()))
    sppo("data", "prepare", *options, *sources, cwd=Path.cwd())


def write_run(case: Case, path: Path, *, steps: int, hardware: Path) -> None:
    """Write the run file of a case as JSON, which is YAML."""
    run = {
        "model": case.model,
        "data": {"tokens": "tokens"},
        "sequence": {
            "length": case.length,
            "num_subsequences": case.num_subsequences,
            "partition": case.partition,
        },
        "parallel": {**dict.fromkeys(DEGREES, 1), "pipeline_parallel_degree": case.pipeline_ranks},
        "activations": {"policy": case.policy},
        "hardware": {"file": str(hardware)},
        "train": {
            "steps": steps,
            "dtype": case.dtype,
            "sequences_per_step": case.sequences,
            "output": f"runs/{path.stem}_{time.strftime('%H%M%S')}",
        },
    }
    if case.pipeline_ranks > 1:
        run["parallel"]["multiplexed"] = case.multiplexed
    if case.disk:
        disk = path.parent / "disk"
        disk.mkdir(exist_ok=True)
        run["activations"] = {"policy": case.policy, "disk": str(disk.absolute()), "tier": "disk"}
    write_text(path, json.dumps(run, indent=1) + "\n")


def train(run_file: Path, directory: Path) -> dict[str, Any]:
    """Train a run; return predicted and median measured seconds by phase, and bytes by bucket."""
    sppo("train", run_file.name, cwd=directory)
    run = json.loads(run_file.read_text())
    summary = json.loads((directory / run["train"]["output"] / "run_summary.json").read_text())
    found = {key: summary[key] for key in ("phases_s", "memory_bytes")}
    if run.get("parallel"):
        found["idle"] = summary["timeline"]
    return found


def title(case: Case) -> str:
    """Return a description of a case in one line."""
    words = [case.name, str(case.length), f"N {case.num_subsequences}", case.dtype, case.policy]
    if case.pipeline_ranks > 1:
        words.append(f"PP {case.pipeline_ranks}" + " MSP" * (case.multiplexed == "on"))
    return " ".join(
        [*words, *["disk"] * case.disk, *[f"x {case.sequences}"] * (case.sequences > 1)]
    )


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print predicted and measured seconds of each phase, and their deviation."""
    print(f"\n{'':<44}" + "".join(f"{name:>22}" for name in (*PHASES, "step")))
    for row in rows:
        cells = []
        for phase in (*PHASES, "step"):
            chosen = PHASES if phase == "step" else (phase,)
            predicted, measured = (
                sum(row["phases_s"][name][kind] for name in chosen)
                for kind in ("predicted", "measured")
            )
            cells.append(f"{predicted:7.3f} {measured:7.3f} {predicted / measured - 1:+6.1%}")
        print(f"{row['case']:<44}" + "".join(f"{cell:>22}" for cell in cells))
    print(f"{'':<44}" + f"{'predicted, measured s':>22}" * (len(PHASES) + 1), flush=True)


def print_idle(rows: list[dict[str, Any]]) -> None:
    """Print predicted and measured idle shares, and exposed copy times, of the last step."""
    for row in rows:
        if (idle := row.get("idle")) is None:
            continue
        print(f"\n{row['case']}")
        share, waits = idle["idle_fraction"], idle["exposed_copy_s_by_rank"]
        print(f"  idle share            {share['predicted']:7.1%} {share['measured']:7.1%}")
        for rank, (predicted, measured) in enumerate(zip(*waits.values(), strict=True)):
            of_step = [
                s / idle["makespan_s"][kind]
                for s, kind in ((predicted, "predicted"), (measured, "measured"))
            ]
            print(f"  copy waits of rank {rank}  {of_step[0]:7.1%} {of_step[1]:7.1%} of the step")


def print_memory(rows: list[dict[str, Any]]) -> None:
    """Print predicted and measured MiB of each bucket, and their deviation."""
    for row in rows:
        print(f"\n{row['case']}")
        for name, pair in row["memory_bytes"].items():
            predicted, measured = (pair[kind] / 2**20 for kind in ("predicted", "measured"))
            apart = f"{predicted / measured - 1:+6.1%}" if measured else ""
            print(f"  {name:<24} {predicted:9.1f} {measured:9.1f} MiB {apart}")


def print_deviations(rows: list[dict[str, Any]]) -> None:
    """Print the median and the largest deviation of step times, and the largest of memory."""
    as_bench, at_speed = [], []
    for row in rows:
        predicted, measured = (
            sum(row["phases_s"][name][kind] for name in PHASES)
            for kind in ("predicted", "measured")
        )
        as_bench.append(abs(predicted / measured - 1))
        at_speed.append(abs(predicted / row["machine_speed"] / measured - 1))
    print(f"\nstep time off by {statistics.median(as_bench):.1%}, at worst {max(as_bench):.1%}")
    print(
        f"at the machine's speed beside each run {statistics.median(at_speed):.1%}, at worst "
        f"{max(at_speed):.1%}"
    )
    off: dict[str, list[float]] = {}
    for row in rows:
        whole = row["memory_bytes"]["all"]["measured"]
        for name, pair in row["memory_bytes"].items():
            apart = abs(pair["predicted"] - pair["measured"])
            if apart > _SMALL * whole:
                off.setdefault(name, []).append(apart / max(pair["measured"], 1))
    for name, apart in off.items():
        print(f"{name}: off by up to {max(apart):.1%} in {len(apart)} of {len(rows)} runs")


def write_report(path: Path, rows: list[dict[str, Any]], hardware: HardwareSpec) -> None:
    """Write the comparison, and how it was made, as JSON."""
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": hardware.name,
        "command": shlex.join(["bash", "scripts/check_prediction.sh", *sys.argv[1:]]),
        "cases": rows,
    }
    write_text(path, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
