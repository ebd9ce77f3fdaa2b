"""Compare orders of the same step on pipeline ranks: sides that differ in their schedule.

Pipeline ranks are processes with one thread each, over gloo. Every rank has an engine for each
side; steps alternate. The first side is the one that others are compared with. A side is a
schedule, ``sppo`` or ``sppo_msp`` (units next to the bubbles are cut into shards, which all ranks
of a group compute together), or ``looped_bfs`` with its number of stages on a rank. The planned
step is simulated with analytic rates, before any unit is run.

    python -m experiments.orders --length 8Ki --plot msp.png
    python -m experiments.orders --length 32Ki --subsequences 8 --model narrow
        --sides sppo,looped_bfs:2,looped_bfs:4,looped_bfs:8
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from experiments import harness
from experiments.planned_rank import PlannedRank
from sppo.plots.timeline import write_png

SCHEDULES = ("sppo", "sppo_msp", "looped_bfs")
NARROW = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_layers": 16,
    "num_heads": 1,
    "num_kv_heads": 1,
    "mlp_size": 256,
}
"""A layer for each of eight stages on two ranks. With 32Ki tokens most of its work is attention."""
MODELS = {"llama": harness.MODEL, "narrow": NARROW}


def main() -> None:
    """Start the ranks, measure the sides in turns, report."""
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--sides", type=harness.several(_side), default=["sppo", "sppo_msp"], help="by commas"
    )
    parser.add_argument("--model", type=harness.one_of(*MODELS), default="llama")
    parser.add_argument("--length", type=harness.positive, default=16384, help="of a sequence")
    parser.add_argument("--subsequences", type=harness.positive, default=4, help="of a sequence")
    parser.add_argument("--ranks", type=harness.positive, default=2)
    parser.add_argument("--sequences", type=harness.positive, default=1, help="of a step")
    parser.add_argument("--steps", type=harness.positive, default=3, help="measured, of each side")
    parser.add_argument("--plot", type=harness.output_file, help="draw the executed steps, as PNG")
    options = parser.parse_args()
    found = harness.run_ranks(_serve, options, ranks=options.ranks)
    harness.print_table(
        ("side", "step", f"of {options.sides[0]}", "planned", "idle", "planned"),
        [
            (
                side,
                f"{row['step_s']:.2f} s",
                f"{row['over_first']:.3f}x",
                f"{row['planned_over_first']:.3f}x",
                f"{row['idle_share']:.1%}",
                f"{row['planned_idle_share']:.1%}",
            )
            for side, row in found["sides"].items()
        ],
    )
    print(f"losses agree to {found['loss_difference']:.1e}")
    harness.write_report(options.output, {**harness.header(), **found})


def _side(text: str) -> str:
    """Return a side: a schedule, and stages on a rank after a colon, if it has several."""
    schedule, colon, stages = text.partition(":")
    if colon:
        harness.positive(stages)
    return f"{harness.one_of(*SCHEDULES)(schedule)}{colon}{stages}"


def _keys(options: argparse.Namespace, side: str) -> dict[str, Any]:
    """Return the run file of a side."""
    schedule, _, stages = side.partition(":")
    return {
        "model": MODELS[options.model],
        "sequence": {
            "length": options.length,
            "num_subsequences": options.subsequences,
            "partition": "flops",
            "alignment": 64,
        },
        "parallel": {
            "pipeline_parallel_degree": options.ranks,
            "virtual_stages": int(stages or 1),
            "schedule": schedule,
            "multiplexed": "on" if schedule == "sppo_msp" else "off",
        },
        "activations": {"policy": "retain", "kv": "retain"},
        "train": {"sequences_per_step": options.sequences},
    }


def _serve(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank; return the figures, complete on rank 0."""
    sides = {side: PlannedRank(_keys(options, side), rank=rank) for side in options.sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    timelines: dict[str, list[Any]] = {side: [] for side in sides}
    for turn in range(options.steps + 1):
        for side, one in sides.items():
            took_s = harness.timed_s(one.step)
            timeline = one.timeline()
            if turn:  # the first one warms up
                seconds[side].append(took_s)
                timelines[side] += [] if timeline is None else [timeline]
            if rank == 0:
                print(f"  turn {turn} {side:<14} {took_s:8.2f} s", flush=True)
    losses = {side: one.loss() for side, one in sides.items()}
    if rank:
        return {}
    if options.plot is not None:
        write_png(options.plot, timelines=[of_side[-1] for of_side in timelines.values()])
    first, *_ = sides
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    planned = {side: one.plan.predicted for side, one in sides.items()}
    return {
        "model": MODELS[options.model],
        "ranks": options.ranks,
        "length": options.length,
        "boundaries": sides[first].plan.boundaries,
        "sequences": options.sequences,
        "loss_difference": max(abs(loss / losses[first] - 1) for loss in losses.values()),
        "sides": {
            side: {
                "step_s": medians[side],
                "all_step_s": seconds[side],
                "over_first": medians[side] / medians[first],
                "planned_over_first": planned[side].step_s / planned[first].step_s,
                "idle_share": statistics.median(one.bubble_fraction for one in timelines[side]),
                "planned_idle_share": planned[side].bubble_fraction,
            }
            for side in sides
        },
    }


if __name__ == "__main__":
    main()
