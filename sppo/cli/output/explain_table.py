"""Explanation of a step as table and JSON: seconds by part, and the rates behind the seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sppo.planning.explain import PARTS, RateUsed, rates_used, step_parts
from sppo.planning.search.evaluated_candidate import EvaluatedCandidate
from sppo.report.lines import print_line
from sppo.units import format_duration

_LEAST_SHOWN = 5e-5
"""Share of the step below which a part is left out of the table if no rank exceeds it."""


def explanation_report(evaluated: EvaluatedCandidate) -> dict[str, Any]:
    """Return the seconds of every rank by part, and the rates behind them, as JSON values."""
    return {
        "ranks": [{f"{name}_s": s for name, s in parts.items()} for parts in step_parts(evaluated)],
        "rates": [asdict(rate) for rate in rates_used(evaluated)],
    }


def print_explanation(evaluated: EvaluatedCandidate, *, console: Console) -> None:
    """Print a table of the seconds by part on some of the ranks, and the rates."""
    ranks = step_parts(evaluated)
    console.print()
    _say(console, f"where the {format_duration(evaluated.step_s)} of a step go on each rank")
    console.print(_parts_table(ranks, step_s=evaluated.step_s))
    _say(console, "how fast the machine was taken to be, and who says so")
    _print_rates(rates_used(evaluated), console=console)


def _parts_table(ranks: Sequence[Mapping[str, float]], *, step_s: float) -> Table:
    """Return a table of the first, busiest and last rank, and the mean share over all ranks."""
    waits = ("communication", "copy", "bubble")
    busiest = min(range(len(ranks)), key=lambda rank: sum(ranks[rank][w] for w in waits))
    shown = sorted({0, busiest, len(ranks) - 1})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for rank in shown:
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("share of all", justify="right")
    for name, text in PARTS.items():
        if all(abs(parts[name]) < _LEAST_SHOWN * step_s for parts in ranks):
            continue
        mean = sum(parts[name] for parts in ranks) / len(ranks) / step_s
        table.add_row(text, *(_seconds(ranks[rank][name]) for rank in shown), f"{mean:.1%}")
    table.add_section()
    table.add_row("step", *(_seconds(step_s) for _ in shown), "100.0%")
    return table


def _print_rates(rates: Sequence[RateUsed], *, console: Console) -> None:
    """Print each rate and, on the next line, its source."""
    width = max(len(rate.figure) for rate in rates)
    for rate in rates:
        share = "" if rate.peak is None else f"  {rate.value / rate.peak:.0%} of the peak"
        _say(console, f" {rate.figure:<{width}}  {_rate(rate):>13}{share}")
        _say(console, f"     {rate.source}")


def _rate(rate: RateUsed) -> str:
    if rate.unit == "B/s":
        return f"{rate.value / 1e9:.4g} GB/s"
    return (
        f"{rate.value / 1e12:.4g} TFLOP/s"
        if rate.value > 1e11
        else f"{rate.value / 1e9:.4g} GFLOP/s"
    )


def _seconds(seconds: float) -> str:
    return f"-{format_duration(-seconds)}" if seconds < 0 else format_duration(seconds)


def _say(console: Console, text: str) -> None:
    print_line(text, console)
