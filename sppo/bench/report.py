"""Measured rates as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sppo.bench.attention_backends import SPAN, BackendKey
from sppo.bench.copy_report import print_copies, print_overlap
from sppo.bench.suite import Measurements
from sppo.bench.timing import Timing
from sppo.planning.rates import AttentionPoint, ElementwisePoint, GemmPoint
from sppo.units import format_count, format_duration, format_tokens

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_measurements(measurements: Measurements, *, console: Console) -> None:
    """One table per subject, and how steady the machine was."""
    if measurements.gemm:
        console.print(_gemm_table(measurements.gemm))
    if measurements.attention:
        console.print(_attention_table(measurements.attention))
    if measurements.backends:
        console.print(_backends_table(measurements.backends))
    if measurements.elementwise:
        console.print(_elementwise_table(measurements.elementwise))
    for copies in measurements.copies:
        print_copies(copies, console=console)
    if measurements.overlap is not None:
        print_overlap(measurements.overlap, console=console)
    console.print(summary_line(measurements), highlight=False, soft_wrap=True)


def summary_line(measurements: Measurements) -> str:
    """How long it took, and how far the rounds of a timing lay apart."""
    spreads = measurements.spreads
    return (
        f"measured {len(spreads)} kernels, copies and shapes on {measurements.device} in "
        f"{format_duration(measurements.wall_s)}; slowest round over fastest: "
        f"{statistics.median(spreads):.0%} apart in the median, {max(spreads):.0%} at worst"
    )


def _gemm_table(points: Sequence[GemmPoint]) -> Table:
    widths = sorted({point.width for point in points})
    by_place = {(p.dtype, p.tokens, p.width): p for p in points}
    table = _table("Linear layers, GFLOP/s, measured: output / input gradient / weight gradient")
    table.add_column("dtype")
    table.add_column("tokens", justify="right")
    for width in widths:
        table.add_column(f"width {width}", justify="right")
    for dtype, tokens in dict.fromkeys((p.dtype, p.tokens) for p in points):
        cells = []
        for width in widths:
            point = by_place.get((dtype, tokens, width))
            rates = (
                ()
                if point is None
                else (
                    point.forward_flops_per_s,
                    point.input_flops_per_s,
                    point.weight_flops_per_s,
                )
            )
            cells.append(_giga(rates))
        table.add_row(dtype, format_tokens(tokens), *cells)
    return table


def _attention_table(points: Sequence[AttentionPoint]) -> Table:
    sizes = sorted({point.head_size for point in points})
    by_place = {(p.dtype, p.queries, p.keys, p.head_size): p for p in points}
    table = _table("Attention over visible pairs, GFLOP/s, measured: forward / backward")
    table.add_column("dtype")
    for heading in ("queries", "keys", *(f"head size {size}" for size in sizes)):
        table.add_column(heading, justify="right")
    for dtype, queries, keys in sorted({(p.dtype, p.queries, p.keys) for p in points}):
        cells = []
        for size in sizes:
            point = by_place.get((dtype, queries, keys, size))
            rates = () if point is None else (point.forward_flops_per_s, point.backward_flops_per_s)
            cells.append(_giga(rates))
        table.add_row(dtype, format_tokens(queries), format_tokens(keys), *cells)
    return table


def _backends_table(timings: Mapping[BackendKey, Timing]) -> Table:
    table = _table(
        f"Attention back ends, measured: {format_tokens(SPAN.queries)} queries at the end of "
        f"{format_tokens(SPAN.keys)} keys, bf16, {SPAN.heads} heads of {SPAN.head_size} on "
        f"{SPAN.kv_heads}"
    )
    table.add_column("back end")
    for direction in ("forward", "backward"):
        table.add_column(direction, justify="right")
    for name in dict.fromkeys(name for name, _ in timings):
        forward, backward = timings[name, "forward"], timings[name, "backward"]
        table.add_row(name, format_duration(forward.median_s), format_duration(backward.median_s))
    return table


def _elementwise_table(points: Sequence[ElementwisePoint]) -> Table:
    columns = sorted({(p.dtype, p.elements) for p in points})
    by_place = {(p.kernel, p.dtype, p.elements): p for p in points}
    table = _table("Element-wise kernels, GB/s of the bytes they must move, measured")
    table.add_column("kernel", no_wrap=True)
    for dtype, elements in columns:
        table.add_column(f"{dtype} {format_count(elements)}", justify="right")
    for kernel in dict.fromkeys(point.kernel for point in points):
        found = (by_place.get((kernel, *column)) for column in columns)
        table.add_row(kernel, *(_giga(() if p is None else (p.bytes_per_s,)) for p in found))
    return table


def _giga(rates: Iterable[float]) -> str:
    values = [rate / 1e9 for rate in rates]
    return " / ".join(f"{v:.0f}" if v >= 9.95 else f"{v:.2g}" for v in values) or "–"


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
