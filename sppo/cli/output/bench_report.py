"""Report of ``sppo bench``: measured rates by subject, and the description made of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sppo.bench.messages import MessageMeasurements
from sppo.bench.suite import Measurements
from sppo.cli.output.bench_attention import print_attention
from sppo.cli.output.bench_copies import print_copies, print_overlap
from sppo.cli.output.bench_figures import flops_unit, format_rates
from sppo.cli.output.printing import say, table
from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import hardware_json
from sppo.hardware.rates import ElementwisePoint, GemmPoint
from sppo.units import format_count, format_duration, format_tokens

_STEADY = 0.25
"""Median spread above which figures are too unsteady to plan with; a choice, not measured."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Report of one run of the benchmarks.

    Attributes:
        found: All measurements.
        spec: Description of the machine with the measured rates.
        output: File that the description was written to; None if there is none.
    """

    found: Measurements
    spec: HardwareSpec
    output: Path | None

    def as_json(self) -> dict[str, Any]:
        """Return the description of the machine and all measurements as JSON values."""
        found = self.found
        report: dict[str, Any] = {
            "device": found.device,
            "wall_s": found.wall_s,
            "num_timings": len(found.spreads),
            "worst_spread": max(found.spreads),
            "output": None if self.output is None else str(self.output),
            "hardware": hardware_json(self.spec),
        }
        if found.backends is not None:
            report["attention_backends"] = [rate.as_json() for rate in found.backends.rates]
        if found.copies:
            report["copies"] = [asdict(copies) for copies in found.copies]
        if found.messages is not None:
            report["messages"] = asdict(found.messages)
        if found.overlap is not None:
            report["overlap"] = asdict(found.overlap)
        return report

    def show(self, console: Console) -> None:
        """Print the rates of each subject, a summary, and a warning if they were unsteady."""
        found = self.found
        if found.gemm:
            _print_gemm(found.gemm, console=console)
        if found.backends is not None:
            print_attention(found.backends, console=console)
        if found.elementwise:
            _print_elementwise(found.elementwise, console=console)
        if found.messages is not None:
            say(console, messages_line(found.messages))
        for copies in found.copies:
            print_copies(copies, console=console)
        if found.overlap is not None:
            print_overlap(found.overlap, console=console)
        say(console, summary_line(found))
        warning = unsteady_line(found.spreads)
        if warning is not None:
            say(console, warning)
        if self.output is not None:
            doubt = "" if warning is None else ", with the unsteady figures above"
            say(console, f"written {self.output}{doubt}", wraps=False)
            say(console, f"in a run file: hardware: {{file: {self.output}}}", wraps=False)


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


def _print_gemm(points: Sequence[GemmPoint], *, console: Console) -> None:
    unit, name = flops_unit(point.forward_flops_per_s for point in points)
    title = f"Linear layers, {name}, measured"
    say(console, f"{title}: output / input gradient / weight gradient")
    widths = sorted({point.width for point in points})
    headings = ("dtype", "tokens", *(f"width {width}" for width in widths))
    console.print(table(headings, _gemm_rows(points, widths, unit)))


def _gemm_rows(
    points: Sequence[GemmPoint], widths: Sequence[int], unit: float
) -> Iterator[list[str]]:
    by_place = {
        (p.dtype, p.tokens, p.width): (
            p.forward_flops_per_s,
            p.input_flops_per_s,
            p.weight_flops_per_s,
        )
        for p in points
    }
    for dtype, tokens in dict.fromkeys((p.dtype, p.tokens) for p in points):
        rates = (by_place.get((dtype, tokens, width), ()) for width in widths)
        yield [dtype, format_tokens(tokens), *(format_rates(of, unit=unit) for of in rates)]


def _print_elementwise(points: Sequence[ElementwisePoint], *, console: Console) -> None:
    say(
        console,
        "Element-wise kernels, GB/s of the bytes they must read and write, by type and elements, "
        "measured",
    )
    columns = sorted({(p.dtype, p.elements) for p in points})
    by_place = {(p.kernel, p.dtype, p.elements): (p.bytes_per_s,) for p in points}
    rows = (
        [kernel, *(format_rates(by_place.get((kernel, *column), ())) for column in columns)]
        for kernel in dict.fromkeys(point.kernel for point in points)
    )
    headings = ("kernel", *(f"{dtype} {format_count(elements)}" for dtype, elements in columns))
    console.print(table(headings, rows))
