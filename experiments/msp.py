"""Compare the same step with and without multiplexed sequence partitioning (MSP).

Pipeline ranks are processes with one thread each, over gloo. Every rank has two engines: one runs
the plain program, the other cuts the units next to the bubbles into shards, which all ranks of an
MSP group compute together. Steps alternate.

    python -m experiments.msp --length 8192 --output msp.json --plot msp.png
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from experiments import harness

SIDES = {"off": "sppo", "on": "sppo_msp"}
"""Schedules by the key ``parallel.multiplexed``."""


def main() -> None:
    """Start the ranks, measure both sides in turns, report."""
    parser = harness.parser(__doc__)
    parser.add_argument("--length", type=harness.positive, default=16384, help="of a sequence")
    parser.add_argument("--subsequences", type=harness.positive, default=4, help="of a sequence")
    parser.add_argument("--ranks", type=harness.positive, default=2)
    parser.add_argument("--sequences", type=harness.positive, default=1, help="of a step")
    parser.add_argument("--steps", type=harness.positive, default=3, help="measured, of each side")
    parser.add_argument("--plot", type=harness.plot_file, help="draw both executed steps, as PNG")
    options = parser.parse_args()
    found = harness.run_ranks(_serve, options, ranks=options.ranks)
    print(
        f"{options.ranks} ranks, {options.sequences} x {options.length} tokens in "
        f"{options.subsequences} subsequences; step {found['step_s']['off']:.2f} s without, "
        f"{found['step_s']['on']:.2f} s with MSP: {found['on_over_off']:.3f}x, planned "
        f"{found['planned_on_over_off']:.3f}x; losses agree to {found['loss_difference']:.1e}"
    )
    harness.write_report(options.output, {**harness.header(), **found})


def _keys(options: argparse.Namespace, side: str) -> dict[str, Any]:
    """Return the run file of a side."""
    return {
        "model": harness.MODEL,
        "sequence": {
            "length": options.length,
            "num_subsequences": options.subsequences,
            "partition": "flops",
            "alignment": 64,
        },
        "parallel": {
            "pipeline_parallel_degree": options.ranks,
            "schedule": SIDES[side],
            "multiplexed": side,
        },
        "activations": {"policy": "retain"},
        "train": {"sequences_per_step": options.sequences},
    }


def _serve(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank; return the figures, complete on rank 0."""
    from experiments.planned_rank import PlannedRank

    sides = {side: PlannedRank(_keys(options, side), rank=rank) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(options.steps + 1):
        for side, one in sides.items():
            took_s = harness.timed_s(one.step)
            if turn:  # the first one warms up
                seconds[side].append(took_s)
            if rank == 0:
                print(f"  turn {turn} {side:4s} {took_s:8.2f} s", flush=True)
    losses = {side: one.loss() for side, one in sides.items()}
    timelines = {side: one.timeline() for side, one in sides.items()}
    measured = {side: timeline for side, timeline in timelines.items() if timeline is not None}
    if measured and options.plot is not None:
        _draw(options.plot, measured)
    step_s = {side: statistics.median(times) for side, times in seconds.items()}
    planned_s = {side: one.plan.predicted.step_s for side, one in sides.items()}
    return {
        "model": harness.MODEL,
        "ranks": options.ranks,
        "length": options.length,
        "boundaries": sides["off"].plan.boundaries,
        "sequences": options.sequences,
        "step_s": step_s,
        "all_step_s": seconds,
        "on_over_off": step_s["on"] / step_s["off"],
        "planned_on_over_off": planned_s["on"] / planned_s["off"],
        "idle_share": {side: timeline.bubble_fraction for side, timeline in measured.items()},
        "loss_difference": abs(losses["on"] / losses["off"] - 1),
    }


def _draw(path: Path, timelines: dict[str, Any]) -> None:
    from sppo.plots.timeline import write_png

    write_png(path, timelines=list(timelines.values()))


if __name__ == "__main__":
    main()
