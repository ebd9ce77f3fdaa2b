"""Tables of measured rates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sppo.bench.messages import MessageMeasurements
from sppo.bench.report.attention_tables import print_attention
from sppo.bench.report.copy_tables import print_copies, print_overlap
from sppo.bench.report.figures import flops_unit, format_rates, measurement_table
from sppo.bench.suite import Measurements
from sppo.hardware.rates import ElementwisePoint, GemmPoint
from sppo.report.lines import print_line
from sppo.units import format_count, format_duration, format_tokens

_STEADY = 0.25
"""Median spread above which figures are too unsteady to plan with; a choice, not measured."""


def print_measurements(measurements: Measurements, *, console: Console) -> None:
    """Print one table per subject, a summary, and a warning if the machine was unsteady."""
    if measurements.gemm:
        console.print(_gemm_table(measurements.gemm))
    if measurements.backends is not None:
        print_attention(measurements.backends, console=console)
    if measurements.elementwise:
        console.print(_elementwise_table(measurements.elementwise))
    if measurements.messages is not None:
        print_line(messages_line(measurements.messages), console)
    for copies in measurements.copies:
        print_copies(copies, console=console)
    if measurements.overlap is not None:
        print_overlap(measurements.overlap, console=console)
    print_line(summary_line(measurements), console)
    warning = unsteady_line(measurements.spreads)
    if warning is not None:
        print_line(warning, console)


def messages_line(found: MessageMeasurements) -> str:
    """Return a line of the rate, latency and compute time of messages between ranks."""
    return (
        f"messages between two ranks: {found.bytes_per_s / 1e9:.2f} GB/s, "
        f"{format_duration(found.latency_s)} for a small one; a byte takes "
        f"{found.compute_s_per_byte * 1e9:.2f} ns of compute on each end"
    )


def summary_line(measurements: Measurements) -> str:
    """Return a line of the duration of the measurement and the spread of its timings."""
    spreads = measurements.spreads
    return (
        f"measured {len(spreads)} kernels, copies and shapes on {measurements.device} in "
        f"{format_duration(measurements.wall_s)}; slowest round over fastest: "
        f"{statistics.median(spreads):.0%} apart in the median, {max(spreads):.0%} at worst"
    )


def unsteady_line(spreads: Sequence[float]) -> str | None:
    """Return a warning if the timings are too unsteady to plan with, else None.

    Args:
        spreads: Difference between the slowest and fastest round of each timing, relative to the
            median.
    """
    median = statistics.median(spreads)
    if median <= _STEADY:
        return None
    return (
        f"warning: half of the timings lay more than {median:.0%} apart, so other programs kept "
        "this machine busy, and plans from these figures are off as much: end them and measure "
        "again"
    )


def _gemm_table(points: Sequence[GemmPoint]) -> Table:
    widths = sorted({point.width for point in points})
    by_place = {
        (p.dtype, p.tokens, p.width): (
            p.forward_flops_per_s,
            p.input_flops_per_s,
            p.weight_flops_per_s,
        )
        for p in points
    }
    unit, name = flops_unit(point.forward_flops_per_s for point in points)
    table = measurement_table(
        f"Linear layers, {name}, measured: output / input gradient / weight gradient"
    )
    table.add_column("dtype")
    table.add_column("tokens", justify="right")
    for width in widths:
        table.add_column(f"width {width}", justify="right")
    for dtype, tokens in dict.fromkeys((p.dtype, p.tokens) for p in points):
        cells = []
        for width in widths:
            rates = by_place.get((dtype, tokens, width), ())
            cells.append(format_rates(rates, unit=unit))
        table.add_row(dtype, format_tokens(tokens), *cells)
    return table


def _elementwise_table(points: Sequence[ElementwisePoint]) -> Table:
    columns = sorted({(p.dtype, p.elements) for p in points})
    by_place = {(p.kernel, p.dtype, p.elements): (p.bytes_per_s,) for p in points}
    table = measurement_table(
        "Element-wise kernels, GB/s of the bytes they must read and write, by type and elements, "
        "measured"
    )
    table.add_column("kernel", no_wrap=True)
    for dtype, elements in columns:
        table.add_column(f"{dtype} {format_count(elements)}", justify="right")
    for kernel in dict.fromkeys(point.kernel for point in points):
        rates = (by_place.get((kernel, *column), ()) for column in columns)
        table.add_row(kernel, *map(format_rates, rates))
    return table
