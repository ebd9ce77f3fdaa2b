"""Compare pipelines with 1, 2, 4 and 8 stages on each rank on one sequence, on the CPU.

Pipeline ranks are processes with one thread each, over gloo. Every rank has an engine for each
number of virtual stages; all engines take their layers from the same initial weights. One stage on
a rank runs SPPO's order, several run the looped order. Steps alternate. The planned idle share is
simulated with analytic rates, before any unit is run.

    python -m experiments.virtual_stages --output docs/results/compare_virtual_stages.json
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from experiments import harness

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_layers": 16,
    "num_heads": 1,
    "num_kv_heads": 1,
    "mlp_size": 256,
}
"""A layer for each of eight stages on two ranks. The model is narrow: with 32Ki tokens most work is
attention."""


def main() -> None:
    """Start the ranks, measure the orders in turns, report."""
    parser = harness.parser(__doc__)
    parser.add_argument("--length", type=harness.positive, default=32768, help="of the sequence")
    parser.add_argument("--subsequences", type=harness.positive, default=8)
    parser.add_argument("--ranks", type=harness.positive, default=2)
    parser.add_argument(
        "--virtual-stages",
        type=harness.several(harness.positive),
        default=[1, 2, 4, 8],
        help="by commas, 1 among them",
    )
    parser.add_argument("--steps", type=harness.positive, default=3, help="measured, of each")
    options = parser.parse_args()
    if 1 not in options.virtual_stages:
        parser.error(f"--virtual-stages {options.virtual_stages}: has no 1 to compare with")
    found = harness.run_ranks(_serve, options, ranks=options.ranks)
    harness.print_table(
        ("stages on a rank", "step", "of one stage", "planned", "idle", "planned"),
        [
            (
                row["virtual_stages"],
                f"{row['step_s']:.2f} s",
                f"{row['over_one']:.3f}x",
                f"{row['simulated_over_one']:.3f}x",
                f"{row['idle_share']:.1%}",
                f"{row['planned_idle_share']:.1%}",
            )
            for row in found["orders"]
        ],
    )
    print(f"losses agree to {found['loss_difference']:.1e}")
    harness.write_report(options.output, {**harness.header(), **found})


def _keys(options: argparse.Namespace, virtual: int) -> dict[str, Any]:
    """Return the run file with a number of stages on a rank."""
    return {
        "model": MODEL,
        "sequence": {
            "length": options.length,
            "num_subsequences": options.subsequences,
            "partition": "flops",
            "alignment": 64,
        },
        "parallel": {
            "pipeline_parallel_degree": options.ranks,
            "virtual_stages": virtual,
            "schedule": "sppo" if virtual == 1 else "looped_bfs",
            "multiplexed": "off",
        },
        "activations": {"policy": "retain", "kv": "retain"},
    }


def _serve(rank: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Run one rank; return the figures on rank 0."""
    from experiments.planned_rank import PlannedRank

    orders = {v: PlannedRank(_keys(options, v), rank=rank) for v in options.virtual_stages}
    seconds: dict[int, list[float]] = {virtual: [] for virtual in orders}
    idle_shares: dict[int, list[float]] = {virtual: [] for virtual in orders}
    for turn in range(options.steps + 1):
        for virtual, order in orders.items():
            took_s = harness.timed_s(order.step)
            timeline = order.timeline()
            if turn:  # the first one warms up
                seconds[virtual].append(took_s)
            if turn and timeline is not None:
                idle_shares[virtual].append(timeline.bubble_fraction)
            if rank == 0:
                print(f"  turn {turn} v = {virtual:<3} {took_s:8.2f} s", flush=True)
    losses = {virtual: order.loss() for virtual, order in orders.items()}
    if rank:
        return None
    medians = {virtual: statistics.median(times) for virtual, times in seconds.items()}
    planned = {virtual: order.plan.predicted for virtual, order in orders.items()}
    return {
        "model": MODEL,
        "ranks": options.ranks,
        "length": options.length,
        "boundaries": orders[1].plan.boundaries,
        "loss_difference": max(abs(loss / losses[1] - 1) for loss in losses.values()),
        "orders": [
            {
                "virtual_stages": virtual,
                "step_s": medians[virtual],
                "all_step_s": seconds[virtual],
                "over_one": medians[virtual] / medians[1],
                "simulated_over_one": planned[virtual].step_s / planned[1].step_s,
                "idle_share": statistics.median(idle_shares[virtual]),
                "planned_idle_share": planned[virtual].bubble_fraction,
            }
            for virtual in orders
        ],
    }


if __name__ == "__main__":
    main()
