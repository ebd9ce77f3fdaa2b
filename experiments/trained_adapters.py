"""Compare step time and memory of training adapters with training all weights, on the CPU.

Both sides train the Llama-shaped model of the README in bf16 on the same tokens, with the same cuts
and the same activation policy. Memory is that of the whole process, training state included, above
that of Python and its libraries. Each side is a process; the sides alternate step by step.
Processor time, of all threads, depends less than the step time on what else the machine does.

    python -m experiments.trained_adapters --length 16Ki --steps 2 --output adapters.json
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from experiments import harness
from experiments.cpu import SPPO_SIDES
from experiments.planned_rank import PlannedRank

SIDES = ("all weights", "adapters")
POLICIES = ("retain", "keep_attention")
SUBSEQUENCE = 2048
"""Tokens of a subsequence."""


def main() -> None:
    """Run both sides in turns with each policy, print the ratios, write the JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("--length", type=harness.positive, default=16384)
    parser.add_argument("--rank", type=harness.positive, default=16, help="rank of the adapters")
    parser.add_argument(
        "--steps", type=harness.positive, default=2, help="measured, of each side, after a warm-up"
    )
    parser.add_argument("--threads", type=harness.positive, default=os.cpu_count() or 1)
    parser.add_argument(
        "--policies", type=harness.several(harness.one_of(*POLICIES)), default=[*POLICIES]
    )
    options = parser.parse_args()
    rows = [compare(options, policy) for policy in options.policies]
    report = {**harness.header(), "threads": options.threads, "rank": options.rank}
    harness.write_report(options.output, {**report, "length": options.length, "rows": rows})


def compare(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Run the steps of both sides in turns with a policy; the first turn is a warm-up."""
    sides = {
        side: harness.Side(
            side,
            _make,
            (policy, options.length, options.rank if side == "adapters" else None),
            threads=options.threads,
        )
        for side in SIDES
    }
    turns = harness.take_turns(sides, turns=options.steps + 1, label=f"{policy} ")
    row: dict[str, Any] = {"policy": policy}
    for side, answers in turns.items():
        steps = [answer for (answer,) in answers[1:]]
        row[side] = {
            "step_s": statistics.median(step["step_s"] for step in steps),
            "processor_s": statistics.median(step["step_s"] * step["cpu_share"] for step in steps),
            "peak_bytes": max(step["peak_bytes"] for step in steps),
            "planned_bytes": steps[0]["planned_bytes"],
        }
    everything, adapters = (row[side] for side in SIDES)
    ratios = {name: adapters[name] / everything[name] for name in everything}
    harness.print_table(
        ("", "step", "processor time", "memory", "planned memory"),
        [
            (
                side,
                *(f"{row[side][name]:.2f} s" for name in ("step_s", "processor_s")),
                *(f"{row[side][name] / 2**20:.0f} MiB" for name in ("peak_bytes", "planned_bytes")),
            )
            for side in SIDES
        ]
        + [("ratio", *(f"{ratio:.3f}" for ratio in ratios.values()))],
    )
    return {**row, "ratios": ratios}


def _make(_: int, arguments: tuple[str, int, int | None]) -> Callable[[], dict[str, Any]]:
    """Build one side: a run that trains adapters of a rank, or all weights."""
    policy, length, rank = arguments
    keys = {
        "model": harness.MODEL,
        "sequence": {
            "length": length,
            "num_subsequences": max(1, length // SUBSEQUENCE),
            "partition": "length",
        },
        **SPPO_SIDES[f"sppo {policy}"],
        **({} if rank is None else {"adapter": {"rank": rank}}),
    }
    trained = PlannedRank(keys, updates=True)
    meter = harness.Meter(counted_bytes=sum(trained.state.device_bytes))
    (memory,) = trained.plan.rank_memory
    return partial(_measured, meter, trained.step, memory.device.total_bytes)


def _measured(
    meter: harness.Meter, step: Callable[[], None], planned_bytes: int
) -> dict[str, float]:
    return {**meter.measure(step), "planned_bytes": planned_bytes}


if __name__ == "__main__":
    main()
