"""Table of measured attention, and a comparison of ``auto``'s choice with the fastest back end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import Console

from sppo.bench.attention_backends import BackendComparison, BackendRate
from sppo.bench.attention_grid import AttentionShape
from sppo.cli.output.bench_figures import NOT_MEASURED, flops_unit, format_rates
from sppo.cli.output.printing import say, table
from sppo.kernels.attention.choice import BackendName
from sppo.units import counted, format_tokens

_MOST_BEHIND = 0.03
"""Fraction of time by which ``auto``'s back end may exceed the fastest and count as equal."""
_AUTOMATIC_MARK = "*"


def print_attention(found: BackendComparison, *, console: Console) -> None:
    """Print a row per shape and a column per back end, then the loss of ``auto`` and the gaps."""
    unit, name = flops_unit(rate.forward_flops_per_s for rate in found.rates)
    title = f"Attention over visible pairs, {name}, measured: forward / backward"
    say(console, f"{title}; the fastest in bold")
    headings = ("dtype", "heads", "size", "queries", "keys", *found.backends)
    console.print(table(headings, _rows(found, unit)))
    say(console, automatic_line(found), *left_out_lines(found))


def automatic_line(found: BackendComparison) -> str:
    """Return a line that compares ``auto``'s back end with the fastest: forward plus backward."""
    mark = f"{_AUTOMATIC_MARK} what auto takes"
    rows = {
        shape: rates for shape, rates in found.by_shape.items() if _has_choice(found, shape, rates)
    }
    if not rows:
        return f"{mark}: no shape was timed with it and another back end"
    behind = {shape: _behind(found, shape, rates) for shape, rates in rows.items()}
    within = sum(value <= _MOST_BEHIND for value in behind.values())
    line = f"{mark}: within {_MOST_BEHIND:.0%} of the fastest on {within} of {len(rows)} shapes"
    if within == len(rows):
        return line
    worst = max(behind, key=lambda shape: behind[shape])
    fastest = _fastest(rows[worst]).backend
    return f"{line}, at worst {behind[worst]:.0%} slower than {fastest} ({worst})"


def left_out_lines(found: BackendComparison) -> list[str]:
    """Return the reasons for gaps in the table, a line per back end and reason."""
    gaps = Counter((name, reason) for (name, _), reason in found.left_out.items())
    return [
        f"{NOT_MEASURED} {name} {reason}: {counted(count, 'shape')}"
        for (name, reason), count in gaps.items()
    ]


def _rows(found: BackendComparison, unit: float) -> Iterator[list[str]]:
    for shape, rates in found.by_shape.items():
        yield [
            shape.dtype,
            str(shape.heads),
            str(shape.head_size),
            format_tokens(shape.queries),
            format_tokens(shape.keys),
            *(_cell(found, shape, rates, backend, unit) for backend in found.backends),
        ]


def _cell(
    found: BackendComparison,
    shape: AttentionShape,
    rates: Mapping[BackendName, BackendRate],
    backend: BackendName,
    unit: float,
) -> str:
    if backend not in rates:
        return NOT_MEASURED
    rate = rates[backend]
    text = format_rates((rate.forward_flops_per_s, rate.backward_flops_per_s), unit=unit)
    if rate is _fastest(rates) and len(rates) > 1:
        text = f"[bold]{text}[/bold]"
    # A blank in place of the mark keeps the figures aligned.
    return f"{text} {_AUTOMATIC_MARK if backend == found.automatic[shape] else ' '}"


def _has_choice(
    found: BackendComparison, shape: AttentionShape, rates: Mapping[BackendName, BackendRate]
) -> bool:
    return found.automatic[shape] in rates and len(rates) > 1


def _behind(
    found: BackendComparison, shape: AttentionShape, rates: Mapping[BackendName, BackendRate]
) -> float:
    """Return the fraction of time by which ``auto``'s back end exceeds the fastest."""
    return rates[found.automatic[shape]].both_s / _fastest(rates).both_s - 1


def _fastest(rates: Mapping[BackendName, BackendRate]) -> BackendRate:
    return min(rates.values(), key=lambda rate: rate.both_s)
