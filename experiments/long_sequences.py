"""Plan the longest sequences on GPUs, and compare the plans with targets of the looped order.

Runs ``sppo solve`` on presets for every row, with analytic rates and a simulated step; nothing is
trained.

    python -m experiments.long_sequences --output docs/results/planned_looped.json
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments import harness
from sppo.parallel.job.exit_codes import NO_PLAN
from sppo.units import format_bytes

_NODE = "configs/run/llama_8b_1m_1node.yaml"
_CLUSTER = "configs/run/gpt_7b_512k_32gpu.yaml"
_H100 = f"{_NODE} hardware.preset=h100 hardware.host_memory=2TiB"
_ONE_H200 = f"{_NODE} hardware.preset=h200 hardware.devices_per_node=1"
_A100S = f"{_CLUSTER} hardware.preset=a100-80g"


@dataclass(frozen=True)
class Target:
    """Request to plan, and the figures that its plan should reach.

    Attributes:
        name: Model, tokens and machine.
        request: Run file of the request, relative to the repository, and its overrides.
        most_s: Upper bound of the seconds of a step; None if the plan only has to fit.
        baseline: Overrides that turn the request into its baseline.
        least_ratio: Lower bound of the baseline's step time over the plan's; None if there is none.
        note: Figures that others measured or published, or the reason why the target cannot be
            reached.
    """

    name: str
    request: str
    most_s: float | None = None
    baseline: str = ""
    least_ratio: float | None = None
    note: str = ""


_ONE_STAGE = "parallel.virtual_stages=1"
TARGETS = (
    Target(
        "Llama-3.1-8B, 1Mi tokens, 8 H100-80 with 2 TiB: at most 270 s",
        _H100,
        most_s=270,
        note="Qwen3-8B, FSDP2 and CP 8 with offload: 380 s measured by others",
    ),
    Target(
        "the same, 3.7M tokens",
        f"{_H100} sequence.length=3700Ki",
        note="ALST: 6 424 s measured by its authors",
    ),
    Target(
        "the same, 3.7M tokens, ZeRO-3, optimizer on the host",
        f"{_H100} sequence.length=3700Ki state.optimizer=host parallel.zero=3",
        note="ALST: 6 424 s measured by its authors",
    ),
    Target(
        "Llama-3.1-8B, 3Mi tokens, 1 H200 with 2 TiB",
        f"{_ONE_H200} hardware.host_memory=2TiB sequence.length=3Mi",
    ),
    Target(
        "Llama-3.1-8B, 512Ki tokens, 1 H200 with 160 GiB and a disk of 64 GiB",
        f"{_ONE_H200} hardware.host_memory=160GiB sequence.length=512Ki "
        "activations.disk=/scratch activations.disk_memory=64GiB",
        note="training state is 135 GiB, layer inputs are 128, K and V 64, and memory that plans "
        "may use is 333; the disk writes 1 GB/s and reads 1.5",
    ),
    Target(
        "Llama-3.1-8B, 500Ki tokens, 1 H100 with 2 TiB: at most 520 s",
        f"{_H100} hardware.devices_per_node=1 sequence.length=500Ki",
        most_s=520,
        note="ALST: 1 010 s measured by its authors",
    ),
    Target(
        "GPT-65B, 1Mi tokens, 128 A100-80",
        f"{_CLUSTER} model.preset=gpt-65b sequence.length=1Mi train.sequences_per_step=1 "
        "hardware.preset=a100-80g hardware.nodes=16",
    ),
    Target(
        "GPT-13B, 512Ki tokens, 64 A100-80: at least 1.40x over recomputing whole layers",
        f"{_CLUSTER} model.preset=gpt-13b hardware.preset=a100-80g hardware.nodes=8",
        baseline=f"activations.policy=recompute {_ONE_STAGE}",
        least_ratio=1.40,
        note="the SPPO paper: 1.44x",
    ),
    Target(
        "GPT-13B, 512Ki tokens, 64 A100-80: beside one stage on a rank",
        f"{_CLUSTER} model.preset=gpt-13b hardware.preset=a100-80g hardware.nodes=8",
        baseline=_ONE_STAGE,
    ),
    Target(
        "GPT-7B, 1Mi tokens, 32 A100-80: beside one stage on a rank",
        f"{_A100S} sequence.length=1Mi",
        baseline=_ONE_STAGE,
    ),
    Target(
        "GPT-7B, 4Mi tokens, 128 A100-80: beside one stage on a rank",
        f"{_A100S} hardware.nodes=16 sequence.length=4Mi",
        baseline=_ONE_STAGE,
    ),
    Target(
        "Llama-3.1-8B, 1Mi tokens, 8 A100-80: beside one stage on a rank",
        f"{_NODE} hardware.preset=a100-80g",
        baseline=_ONE_STAGE,
    ),
)


def main() -> None:
    """Plan every target, then print and write the results."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    options = parser.parse_args()
    rows = []
    for target in TARGETS:
        if options.only in target.name:
            rows.append(row(target))
            print(f"  planned: {target.name}", flush=True)
    headings = ("step", "MFU", "device", "host, node", "SP/PP/DP", "v", "N", "ratio", "reached")
    harness.print_table(
        ("target", *headings),
        [
            (
                one["target"],
                *_cells(one["found"]),
                f"{one['ratio']:.2f}" if one["ratio"] else "",
                "yes" if one["reached"] else "no",
            )
            for one in rows
        ],
    )
    about = "Planned, never run: sppo solve on presets (analytic rates, simulated steps)."
    harness.write_report(
        options.output, {"what": about, **harness.header("simulated"), "rows": rows}
    )


def row(target: Target) -> dict[str, Any]:
    """Return a target with its commands, their results, and whether the target is reached."""
    words = target.request.split()
    found, baseline, ratio = solve(words), None, None
    reached = found["feasible"] and (target.most_s is None or found["step_s"] <= target.most_s)
    if target.baseline:
        baseline = solve([*words, *target.baseline.split()])
        if found["feasible"] and baseline["feasible"]:
            ratio = baseline["step_s"] / found["step_s"]
        reached &= target.least_ratio is None or (ratio is not None and ratio >= target.least_ratio)
    return {
        "target": target.name,
        "command": shlex.join(["sppo", "solve", *words]),
        "found": found,
        "baseline_changes": target.baseline.split(),
        "baseline": baseline,
        "ratio": ratio,
        "reached": reached,
        "note": target.note,
    }


def solve(words: Sequence[str]) -> dict[str, Any]:
    """Return the figures of the best plan, or why nothing fits and what would.

    Raises:
        RuntimeError: The request is refused.
    """
    answer = json.loads(
        harness.sppo("solve", *words, "--json", cwd=harness.ROOT, codes=(0, NO_PLAN))
    )
    if not answer["feasible"]:
        advice = [f"{one['change']}: {one['effect']}" for one in answer["advice"]]
        return {"feasible": False, "reason": answer["nearest"]["reason"], "advice": advice}
    best = answer["best"]
    predicted = ("step_s", "mfu", "bubble_fraction", "device_peak_bytes")
    degrees = ("sequence_parallel_degree", "pipeline_parallel_degree", "data_parallel_degree")
    chosen = ("virtual_stages", "num_subsequences", "schedule", "policy", "kv", "state")
    return {
        "feasible": True,
        **{name: best["predicted"][name] for name in predicted},
        "degrees": [best[name] for name in degrees],
        **{name: best[name] for name in ("node_host_peak_bytes", *chosen)},
    }


def _cells(found: dict[str, Any]) -> list[str]:
    if not found["feasible"]:
        return ["nothing fits", *[""] * 6]
    return [
        f"{found['step_s']:.1f} s",
        f"{found['mfu']:.1%}",
        format_bytes(found["device_peak_bytes"]),
        format_bytes(found["node_host_peak_bytes"]),
        "/".join(map(str, found["degrees"])),
        str(found["virtual_stages"]),
        str(found["num_subsequences"]),
    ]


if __name__ == "__main__":
    main()
