"""Explanation of a step, on a screen and as JSON: seconds by part, and the rates behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sppo.cli.printing import Screen, table
from sppo.planning.explain import PARTS, RateUsed, rates_used, step_parts
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.units import format_duration

_LEAST_SHOWN = 5e-5
"""Share of the step below which a part is left out of the table if no rank exceeds it."""


def explanation_json(evaluated: EvaluatedCandidate) -> dict[str, Any]:
    """Return the seconds of every rank by part, and the rates behind them, as JSON values."""
    return {
        "ranks": [{f"{name}_s": s for name, s in parts.items()} for parts in step_parts(evaluated)],
        "rates": [asdict(rate) for rate in rates_used(evaluated)],
    }


def explanation_screen(evaluated: EvaluatedCandidate) -> Screen:
    """Yield the seconds by part on the first, the busiest and the last rank, and the rates."""
    ranks, rates = step_parts(evaluated), rates_used(evaluated)
    waits = ("communication", "copy", "bubble")
    busiest = min(range(len(ranks)), key=lambda rank: sum(ranks[rank][w] for w in waits))
    shown = sorted({0, busiest, len(ranks) - 1})
    yield ""
    yield f"where the {format_duration(evaluated.step_s)} of a step go on each rank"
    headings = ["", *(f"rank {rank}" for rank in shown), "share of all"]
    yield table(headings, _part_rows(ranks, shown, step_s=evaluated.step_s))
    yield "how fast the machine was taken to be, and who says so"
    width = max(len(rate.figure) for rate in rates)
    for rate in rates:
        share = "" if rate.peak is None else f"  {rate.value / rate.peak:.0%} of the peak"
        yield f" {rate.figure:<{width}}  {_rate_text(rate):>13}{share}"
        yield f"     {rate.source}"


def _part_rows(
    ranks: Sequence[Mapping[str, float]], shown: Sequence[int], *, step_s: float
) -> Iterator[Sequence[str] | None]:
    """Yield rows of seconds on the shown ranks, and of the mean share over all ranks."""
    for name, text in PARTS.items():
        if all(abs(parts[name]) < _LEAST_SHOWN * step_s for parts in ranks):
            continue
        mean = sum(parts[name] for parts in ranks) / len(ranks) / step_s
        yield [text, *(_seconds(ranks[rank][name]) for rank in shown), f"{mean:.1%}"]
    yield None
    yield ["step", *(_seconds(step_s) for _ in shown), "100.0%"]


def _rate_text(rate: RateUsed) -> str:
    if rate.unit == "B/s":
        return f"{rate.value / 1e9:.4g} GB/s"
    tera = rate.value > 1e11
    return f"{rate.value / 1e12:.4g} TFLOP/s" if tera else f"{rate.value / 1e9:.4g} GFLOP/s"


def _seconds(seconds: float) -> str:
    return f"-{format_duration(-seconds)}" if seconds < 0 else format_duration(seconds)
