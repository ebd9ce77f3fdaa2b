"""Plan Llama-3.1-8B on 8 H100 at the lengths that others measured, beside what they measured.

Every plan is what ``sppo solve`` answers for ZeRO-3, which shards as their FSDP2 does, and 2 TiB of
host memory in the node: once with the published rates of the attention kernel that they ran, and
once with the kernel rates of ``configs/hardware/h100_80g_measured.json``. Their Ulysses layout is
priced by the same cost model, so that its error at each length is known. Lengths that fit and steps
of 1Mi tokens are priced for all baseline methods. Nothing is trained.

    python -m experiments.peers --output docs/results/planned_peers.json
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments import harness
from experiments.baselines import baselines
from experiments.long_sequences import solve
from experiments.published import Published, compare
from sppo.config import load_run
from sppo.hardware.run_hardware import run_hardware
from sppo.units import parse_size

DEVICES = 8
_RUN = "configs/run/llama_8b_1m_1node.yaml"
_REQUEST = "model={preset: llama-3.1-8b}", "hardware.host_memory=2TiB", "parallel.zero=3"
MACHINES = {
    "published": ("hardware.preset=h100", "hardware.attention=flash_attn_3"),
    "measured": (
        "hardware.preset=null",
        "hardware.file=configs/hardware/h100_80g_measured.json",
        f"hardware.devices_per_node={DEVICES}",
    ),
}
"""Words of a request that choose the rates of kernels, by where those come from."""

Row = dict[str, Any]


def main() -> None:
    """Plan every length, then print and write the rows."""
    options = harness.parser(__doc__).parse_args()
    others = json.loads(Path(__file__).with_name("peers.json").read_text())
    rows = []
    for at, length in enumerate(others["lengths"]):
        measured = {name: rates[at] for name, rates in others["tokens_per_s"].items() if rates[at]}
        rows.append(row(length, measured))
        print(f"planned: {length}", flush=True)
    headings = ("measured by others", "planned", "rates of one H100", "their Ulysses, priced")
    harness.print_table(("tokens", *headings), [_cells(one) for one in rows])
    about = "Planned by sppo solve, never run, beside what others measured on their machines."
    report = {
        "what": about,
        **harness.header("simulated"),
        "others": others,
        "rows": rows,
        "methods": methods(),
    }
    harness.write_report(options.output, report)


def row(length: str, measured: Mapping[str, float]) -> Row:
    """Return the plans of one length beside tokens per second and device of each other method."""
    best = max(measured, key=lambda name: measured[name])
    ulysses = measured.get("Ulysses")
    return {
        "tokens": length,
        "measured": measured,
        "best": best,
        "ulysses_priced": ulysses and compare(ulysses_layout(length, ulysses))["time_ratio"],
        "plans": {rates: plan(length, rates) for rates in MACHINES},
    }


def methods() -> list[Row]:
    """Return the longest sequence and the step at 1Mi tokens of every method, as priced."""
    _, *words = _words("1Mi", "published")
    run = load_run(harness.ROOT / _RUN, words)
    return [asdict(one) for one in baselines(run, run_hardware(run))]


def plan(length: str, rates: str) -> Row:
    """Return the best plan of one length with the kernel rates of one of `MACHINES`."""
    words = _words(length, rates)
    found = solve(words)
    if found["feasible"]:
        found["tokens_per_s"] = parse_size(length) / found["step_s"] / DEVICES
    return {"command": shlex.join(["sppo", "solve", *words]), **found}


def _words(length: str, rates: str) -> tuple[str, ...]:
    return (_RUN, *_REQUEST, *MACHINES[rates], f"sequence.length={length}")


def ulysses_layout(length: str, tokens_per_s: float) -> Published:
    """Return the Ulysses run of the same authors as a layout of the cost model."""
    tokens = parse_size(length)
    return Published(
        name=f"Ulysses, Llama-3-8B {length}, 8 H100",
        source="arXiv:2602.21196",
        model={"preset": "llama-3.1-8b"},
        machine={"preset": "h100", "attention": "flash_attn_3"},
        length=tokens,
        layout={"zero": 3},
        workload={"sequence_parallel_degree": DEVICES},
        recomputed=(0.0, 1.0, 1.0),
        inputs_offloaded=True,
        measured_s=tokens / tokens_per_s / DEVICES,
        reasons=(),
    )


def _cells(one: Row) -> tuple[str, ...]:
    plans = [one["plans"][rates] for rates in MACHINES]
    priced = one["ulysses_priced"]
    return (
        one["tokens"],
        f"{one['measured'][one['best']]} ({one['best']})",
        *(f"{p['tokens_per_s']:.0f}" if p["feasible"] else "nothing fits" for p in plans),
        "" if priced is None else f"{priced:.2f} of their time",
    )


if __name__ == "__main__":
    main()
