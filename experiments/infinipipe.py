"""Simulate InfiniPipe's comparison on its machine, beside the figures of its paper.

GPT on 4 nodes of 8 A800-40GB, steps of 512 samples with lengths like GitHub's or CommonCrawl's. All
sides run Seq1F1B, once with the degrees of the paper (sequence parallelism inside a node, one
pipeline stage on each node) and once each with the degrees that are fastest for the side:

- *fixed*: chunks of a fixed number of tokens; each recomputes as little as fits.
- *fixed_uniform*: fixed chunks; all recompute the same number of layers, the least that fits.
- *fixed_recomputed*: fixed chunks; all recompute everything.
- *elastic*: the step planner decides chunks, recomputation and how many forwards ranks begin ahead.
- *unbalanced*: like elastic, in fixed chunks.
- *retained*, *recomputed*: like elastic, with nothing or everything recomputed.

Fixed chunks have the size with which their steps are fastest in simulation. The baseline, Seq1F1B,
is the faster of the first two sides. Nothing is offloaded if the longest sample fits without it. No
figure is fitted to the result.

    python -m experiments.infinipipe --output docs/results/compare_infinipipe.json

Cases in the output that are not asked for stay there, so a few may be run at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from experiments import harness
from experiments.infinipipe_sides import (
    BASELINES,
    LAYOUTS,
    MODELS,
    PRESET,
    SIDES,
    Case,
    Side,
    planned_sides,
)
from experiments.packing_sides import figures as figures_of_plans
from experiments.sides import deviation
from sppo.data.samples.length_distributions import DISTRIBUTIONS
from sppo.planning.elastic.step_plan import StepPlan
from sppo.units import KIB

PUBLISHED = {
    "bubble_fraction": 0.2,
    "time_deviation": 0.062,
    "length_deviation": 0.055,
    "planning_s": 5.0,
}
"""Published figures of InfiniPipe: idle share, deviations of chunks, seconds of planning."""
PUBLISHED_RATIOS = {48 * KIB: 1.27, 64 * KIB: 1.23, 96 * KIB: 1.40, 192 * KIB: 1.63}
"""Published tokens per second of InfiniPipe relative to Seq1F1B, by the longest sample."""
_ONLY_13B = (64 * KIB, 192 * KIB)
"""Longest samples for which InfiniPipe reports figures of 13B only."""
_NAMES = ("model", "distribution", "longest", "layout")
_OVER = "over_seq1f1b"


def main() -> None:
    """Simulate the requested cases, print and write their figures."""
    parser = harness.parser(__doc__)
    several, one_of, positive = harness.several, harness.one_of, harness.positive
    parser.add_argument("--models", type=several(one_of(*MODELS)), default=list(MODELS))
    parser.add_argument(
        "--distributions",
        type=several(one_of(*DISTRIBUTIONS)),
        default=["github", "commoncrawl"],
        help="of the lengths of samples",
    )
    parser.add_argument(
        "--longest",
        type=several(positive),
        default=[48 * KIB, 96 * KIB],
        help="tokens of the longest sample; longer ones are cut",
    )
    parser.add_argument("--layouts", type=several(one_of(*LAYOUTS)), default=list(LAYOUTS))
    parser.add_argument("--samples", type=positive, default=512, help="of a step")
    parser.add_argument("--steps", type=positive, default=2, help="each of other samples")
    parser.add_argument("--sides", type=several(one_of(*SIDES)), default=list(SIDES))
    options = parser.parse_args()
    for names in product(options.models, options.distributions, options.longest, options.layouts):
        case = Case(*names, samples=options.samples, steps=options.steps)
        found = compare(case, sides=options.sides)
        print_case(found)
        if options.output is not None:
            write_case(options.output, found)


def write_case(output: Path, found: Mapping[str, Any]) -> None:
    """Write the figures of a case to a file with several cases, replacing its older figures."""
    before = json.loads(output.read_text())["cases"] if output.exists() else []
    cases = {tuple(row[name] for name in _NAMES): row for row in (*before, found)}
    published = {**PUBLISHED, _OVER: PUBLISHED_RATIOS}
    rows = [cases[names] for names in sorted(cases)]
    header = harness.header("simulated")
    harness.write_report(output, {**header, "published": published, "cases": rows})


def compare(case: Case, *, sides: Sequence[str]) -> dict[str, Any]:
    """Return the figures of all sides of a case; the reason for a side that does not fit."""
    found: dict[str, dict[str, Any]] = {}
    for name, side in planned_sides(case, sides).items():
        if isinstance(side, str):
            found[name] = {"fits": False, "reason": side}
        else:
            found[name] = figures(side, case)
    rates = {name: side["tokens_per_s"] for name, side in found.items() if side["fits"]}
    baseline = max((rates[name] for name in BASELINES if name in rates), default=None)
    for name, rate in rates.items():
        found[name][_OVER] = None if baseline is None else rate / baseline
    return {
        **{name: getattr(case, name) for name in _NAMES},
        "command": harness.command(),
        "hardware": PRESET,
        "samples": [len(lengths) for lengths in case.lengths],
        "tokens": [sum(lengths) for lengths in case.lengths],
        "published_ratio": _published_ratio(case),
        "sides": found,
    }


def _published_ratio(case: Case) -> float | None:
    """Return the published ratio of a case; None if there is none."""
    unknown = case.longest in _ONLY_13B and case.model != "13b"
    return None if unknown else PUBLISHED_RATIOS.get(case.longest)


def figures(side: Side, case: Case) -> dict[str, Any]:
    """Return the figures of the steps of a side."""
    plans = [step.plan for step in side.steps]
    seconds, tokens = side.seconds, sum(map(sum, case.lengths))
    candidate = plans[0].evaluated.candidate
    return {
        "fits": True,
        **asdict(plans[0].evaluated.degrees),
        "zero": candidate.zero,
        "optimizer": candidate.state.optimizer,
        **figures_of_plans(plans, case.lengths),
        "bubble_fraction": sum(plan.bubble_fraction * plan.step_s for plan in plans) / seconds,
        "parts_s": _mean_parts(plans),
        # With everything retained, so that chunks are compared and not their placement.
        "time_deviation": median(deviation(chunk_seconds(plan)) for plan in plans),
        "device_peak_bytes": max(plan.device_peak_bytes for plan in plans),
        "planning_s": max(step.planning_s for step in side.steps),
        "tokens_per_s_by_chunk": {size: tokens / took_s for size, took_s in side.chunk_s.items()},
    }


def chunk_seconds(plan: StepPlan) -> list[float]:
    """Return the seconds of each chunk over all stages, with everything retained."""
    units = plan.evaluated.prices.seconds.units
    seconds: list[float] = (units.forward + units.backward + units.weight).sum(axis=0).tolist()
    return seconds


def _mean_parts(plans: Sequence[StepPlan]) -> dict[str, float]:
    """Return the seconds of a step by part, averaged over its ranks and over the steps."""
    parts = [_parts(plan) for plan in plans]
    return {name: mean(of_step[name] for of_step in parts) for name in parts[0]}


def _parts(plan: StepPlan) -> dict[str, float]:
    evaluated = plan.evaluated
    costs, simulated = evaluated.costs, evaluated.simulated
    assert simulated is not None, "every plan of a step is simulated"
    ranks = evaluated.candidate.pipeline_parallel_degree
    retained = sum(chunk_seconds(plan)) / ranks
    computed = float((costs.forward_s + costs.backward_s + costs.weight_s).sum()) / ranks
    update = float(costs.reduce_s.sum()) / ranks
    bubble, messages, _ = np.mean(simulated.idle_s, axis=0).tolist()
    return {
        "compute": retained,
        "recompute": computed - retained,
        "bubble": bubble - update,
        "messages": messages,
        "update": update,
    }


def print_case(row: Mapping[str, Any]) -> None:
    """Print a row for each side, under a title with the published ratio."""
    degrees = "the paper's degrees" if row["layout"] == "paper" else "the fastest degrees of each"
    print(
        f"GPT-{row['model'].upper()}, {row['distribution']} up to {row['longest'] // KIB}Ki, "
        f"{degrees}, published {row['published_ratio'] or '-'}x"
    )
    headings = ("tokens/s", "of Seq1F1B", "idle", "recomputing", "time", "length", "chunks")
    harness.print_table(
        ("side", "DP x PP x SP", *headings, "tokens", "planned in"),
        [(name, *_cells(side)) for name, side in row["sides"].items()],
    )


def _cells(side: Mapping[str, Any]) -> list[str]:
    if not side["fits"]:
        return ["does not fit"]
    over, parts = side[_OVER], side["parts_s"]
    return [
        " x ".join(str(side[f"{name}_parallel"]) for name in ("data", "pipeline", "sequence")),
        f"{side['tokens_per_s']:.0f}",
        "" if over is None else f"{over:.2f}x",
        f"{side['bubble_fraction']:.1%}",
        f"{parts['recompute'] / mean(side['step_s']):.1%}",
        f"{side['time_deviation']:.1%}",
        f"{side['length_deviation']:.1%}",
        f"{median(side['chunks']):.0f}",
        f"{max(side['most_tokens'])}",
        f"{side['planning_s']:.2f} s",
    ]


if __name__ == "__main__":
    main()
