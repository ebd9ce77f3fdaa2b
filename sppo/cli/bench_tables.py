"""Report of ``sppo bench``: measured rates by subject, and the description made of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from sppo.bench.attention import AttentionRates
from sppo.bench.copies import CopyMeasurements, CopyPoint
from sppo.bench.overlap import OverlapMeasurements
from sppo.bench.suite import Measurements
from sppo.cli.printing import Screen, Unbroken, item_table, table
from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import hardware_json
from sppo.hardware.rates import ElementwisePoint, GemmPoint
from sppo.units import format_bytes, format_count, format_duration, format_tokens

NOT_MEASURED = "–"
_TERA_FROM = 1e13
_STEADY = 0.25
"""Median spread above which figures are too unsteady to plan with; a choice, not measured."""


def bench_json(found: Measurements, spec: HardwareSpec, output: Path | None) -> dict[str, Any]:
    """Return the description of the machine and all measurements as JSON values.

    Args:
        found: All measurements.
        spec: Description of the machine with the measured rates.
        output: File that the description was written to; None if there is none.
    """
    values: dict[str, Any] = {
        "device": found.device,
        "wall_s": found.wall_s,
        "num_timings": len(found.spreads),
        "worst_spread": max(found.spreads),
        "output": None if output is None else str(output),
        "hardware": hardware_json(spec),
    }
    if found.attention is not None:
        values["attention_backends"] = [
            {"dtype": dtype, "head_size": size, "backend": name}
            for (dtype, size), name in found.attention.backends.items()
        ]
    if found.copies:
        values["copies"] = [asdict(copies) for copies in found.copies]
    others = {"rule": found.rule, "messages": found.messages, "overlap": found.overlap}
    return values | {name: asdict(of) for name, of in others.items() if of is not None}


def bench_screen(found: Measurements, output: Path | None) -> Screen:
    """Yield the rates of each subject, a summary, and a warning if they were unsteady."""
    if found.gemm:
        yield from _gemm(found.gemm)
    if found.attention is not None:
        yield from attention_screen(found.attention)
    if found.elementwise:
        yield from _elementwise(found.elementwise)
    if found.rule is not None:
        yield (
            f"delta rule of linear attention: {found.rule.rule_flops_per_s / 1e9:.3g} GFLOP/s, and "
            f"{format_duration(found.rule.rule_step_s)} for each chunk of a scan"
        )
    if found.messages is not None:
        yield (
            f"messages between two ranks: {found.messages.bytes_per_s / 1e9:.2f} GB/s, "
            f"{format_duration(found.messages.latency_s)} for a small one; a byte takes "
            f"{found.messages.compute_s_per_byte * 1e9:.2f} ns of compute on each end"
        )
    for copies in found.copies:
        yield from copies_screen(copies)
    if found.overlap is not None:
        yield from overlap_screen(found.overlap)
    median = statistics.median(found.spreads)
    yield (
        f"measured {len(found.spreads)} kernels, copies and shapes on {found.device} in "
        f"{format_duration(found.wall_s)}; slowest round over fastest: {median:.0%} apart in the "
        f"median, {max(found.spreads):.0%} at worst"
    )
    is_unsteady = median > _STEADY
    if is_unsteady:
        yield (
            f"warning: half of the timings lay more than {median:.0%} apart, so other programs "
            "kept this machine busy, and plans from these figures are off as much: end them and "
            "measure again"
        )
    if output is not None:
        doubt = ", with the unsteady figures above" if is_unsteady else ""
        yield Unbroken(f"written {output}{doubt}")
        yield Unbroken(f"in a run file: hardware: {{file: {output}}}")


# Rates of kernels


def _gemm(points: Sequence[GemmPoint]) -> Screen:
    unit, name = _flops_unit(point.forward_flops_per_s for point in points)
    yield f"Linear layers, {name}, measured: output / input gradient / weight gradient"
    cells = []
    for p in points:
        rates = (p.forward_flops_per_s, p.input_flops_per_s, p.weight_flops_per_s)
        row = (p.dtype, format_tokens(p.tokens))
        cells.append((row, f"width {p.width}", _rates_text(rates, unit=unit)))
    yield _rates_table(("dtype", "tokens"), cells)


def attention_screen(found: AttentionRates) -> Screen:
    """Yield a row per number of queries and a column per ratio of keys to queries."""
    unit, name = _flops_unit(point.forward_flops_per_s for point in found.points)
    yield (
        f"Attention of {found.heads} heads over visible pairs, {name}, measured: forward / "
        "backward; 4x keys: four keys for each query"
    )
    cells = []
    for p in found.points:
        backend = found.backends[p.dtype, p.head_size]
        row = (backend, p.dtype, str(p.head_size), format_tokens(p.queries))
        rates = _rates_text((p.forward_flops_per_s, p.backward_flops_per_s), unit=unit)
        cells.append((row, f"{p.keys // p.queries}x keys", rates))
    yield _rates_table(("back end", "dtype", "head size", "queries"), cells)


def _elementwise(points: Sequence[ElementwisePoint]) -> Screen:
    yield (
        "Element-wise kernels, GB/s of the bytes they must read and write, by type and elements, "
        "measured"
    )
    cells = (
        ((p.kernel,), f"{p.dtype} {format_count(p.elements)}", _rates_text((p.bytes_per_s,)))
        for p in points
    )
    yield _rates_table(("kernel",), cells)


def _rates_table(
    headings: Sequence[str], cells: Iterable[tuple[tuple[str, ...], str, str]]
) -> Table:
    """Return a table of rates by row and column, each in the order of first appearance.

    Args:
        headings: Headings of the cells that name a row.
        cells: For each rate the cells that name its row, the heading of its column, and the text.
    """
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for row, column, text in cells:
        rows.setdefault(row, {})[column] = text
    columns = dict.fromkeys(column for texts in rows.values() for column in texts)
    filled = (
        [*row, *(texts.get(column, NOT_MEASURED) for column in columns)]
        for row, texts in rows.items()
    )
    return table((*headings, *columns), filled)


def _flops_unit(rates: Iterable[float]) -> tuple[float, str]:
    """Return (divisor, name) of the unit of rates: TFLOP/s from 10 TFLOP/s on, else GFLOP/s."""
    return (1e12, "TFLOP/s") if max(rates) >= _TERA_FROM else (1e9, "GFLOP/s")


def _rates_text(rates: Iterable[float], *, unit: float = 1e9) -> str:
    """Return ``123 / 4.5``: rates in ``unit``, whole numbers from ten on, two digits below."""
    values = [rate / unit for rate in rates]
    return " / ".join(f"{v:.0f}" if v >= 9.95 else f"{v:.2g}" for v in values)


# Copies, alone and behind compute


def copies_screen(found: CopyMeasurements) -> Screen:
    """Yield the rates of copies to one tier, and the rates that plans will use."""
    out, back = ("write", "read") if found.tier == "disk" else ("D2H", "H2D")
    yield f"Copies, GB/s, measured: {out} or {back} alone, and both at once"
    columns: dict[str, Callable[[CopyPoint], str]] = {
        "request": lambda point: format_bytes(point.request_bytes),
        out: lambda point: _giga(point.out_alone_bytes_per_s),
        back: lambda point: _giga(point.back_alone_bytes_per_s),
        f"both: {out}": lambda point: _giga(point.out_bytes_per_s),
        f"both: {back}": lambda point: _giga(point.back_bytes_per_s),
    }
    if found.tier == "host":
        columns = {"by": lambda point: point.package, **columns}
    yield item_table(found.points, columns)
    yield found.where
    planned = found.planned
    yield (
        f"plans use requests of {format_bytes(planned.request_bytes)}, both at once: "
        f"{_giga(planned.out_bytes_per_s)} GB/s out, {_giga(planned.back_bytes_per_s)} back"
    )


def overlap_screen(found: OverlapMeasurements) -> Screen:
    """Yield the copies that overlap with a layer's forward, and what they cost its compute."""
    yield (
        "Compute alone, copy alone, and both: how much of the copy is exposed, and the change of "
        "compute's time; measured"
    )
    changes = {
        "tokens": lambda point: format_tokens(point.tokens),
        "after": lambda point: format_tokens(point.context),
        "compute": lambda point: format_duration(point.compute_s),
        "copy": lambda point: format_duration(point.copy_s),
        "exposed": lambda point: format_duration(point.exposed_s),
        "change": lambda point: f"{point.compute_copying_s / point.compute_s - 1:+.1%}",
    }
    yield item_table(found.points, changes, left=0)
    per_token = format_bytes(found.points[0].moved_bytes / found.points[0].tokens)
    yield (
        f"the forward of one layer of {found.model}, {found.dtype}; everything it saves, "
        f"{per_token} a token, copied {found.where}"
    )
    yield f"compute that a copied byte costs, for plans: {found.added_s_per_byte * 1e9:.2g} ns"
    for tokens, context, reason in found.left_out:
        where = f"{format_tokens(tokens)} tokens after {format_tokens(context)}"
        yield f"left out: {where}, and longer: {reason}"


def _giga(rate: float) -> str:
    value = rate / 1e9
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"
