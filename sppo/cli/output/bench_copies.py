"""Tables of measured copies, and of copies that overlap with compute."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from sppo.bench.break_even import BreakEven
from sppo.bench.copies import CopyMeasurements
from sppo.bench.overlap import OverlapMeasurements
from sppo.cli.output.bench_figures import NOT_MEASURED
from sppo.cli.output.printing import say, table
from sppo.units import format_bytes, format_duration, format_tokens

_LENGTH_MARK = "~"
"""Mark before a length that was extrapolated."""


def print_copies(found: CopyMeasurements, *, console: Console) -> None:
    """Print the rates of copies to one tier, and the rates that plans will use."""
    out, back = ("write", "read") if found.tier == "disk" else ("D2H", "H2D")
    say(console, f"Copies, GB/s, measured: {out} or {back} alone, and both at once")
    node = ["node"] if _on_nodes(found) else []
    rates = [out, back, f"both: {out}", f"both: {back}"]
    headings = ["through", "request", "in flight", *node, *rates]
    console.print(table(headings, _copy_rows(found)))
    say(console, *copies_lines(found))


def print_overlap(found: OverlapMeasurements, *, console: Console) -> None:
    """Print the copies that overlap with a layer's forward, and the break-even lengths."""
    say(
        console,
        "Compute alone, copy alone, and both: how much of the copy is exposed, and the change of "
        "compute's time: all of it, matrix products, attention; measured",
    )
    headings = ["tokens", "after", "compute", "copy", "exposed", "change", "products", "attention"]
    console.print(table(headings, _overlap_rows(found), left=0))
    say(console, "Break-even: tokens of the shortest subsequence whose copy hides")
    headings = ["context", "everything saved", "layer input + attention output"]
    console.print(table(headings, _break_even_rows(found.break_evens), left=0))
    say(console, *overlap_lines(found))


def copies_lines(found: CopyMeasurements) -> list[str]:
    """Return the lines under the table of copies."""
    planned = found.planned
    lines = [found.where]
    if found.first_write_bytes_per_s:
        rate = _giga(found.first_write_bytes_per_s)
        lines.append(f"first write of space that was only set aside: {rate} GB/s")
    if found.register_s_per_gib:
        lines.append(f"page-locking an arena: {format_duration(found.register_s_per_gib)} per GiB")
    lines.append(
        f"plans use {planned.how}, requests of {format_bytes(planned.request_bytes)}, both at "
        f"once: {_giga(planned.out_bytes_per_s)} GB/s out, {_giga(planned.back_bytes_per_s)} back"
    )
    return lines


def overlap_lines(found: OverlapMeasurements) -> list[str]:
    """Return the lines under the tables of overlap."""
    point = found.points[0]
    per_token = format_bytes(point.moved_bytes / point.tokens)
    lines = [
        f"the forward of one layer of {found.model}, {found.dtype}; everything it saves, "
        f"{per_token} a token, copied {found.where}",
        f"compute that a copied byte costs, for plans: {found.added_s_per_byte * 1e9:.2g} ns",
    ]
    for tokens, context, reason in found.left_out:
        where = f"{format_tokens(tokens)} tokens after {format_tokens(context)}"
        lines.append(f"left out: {where}, would take {reason}")
    if any(not (b.everything_measured and b.kept_measured) for b in found.break_evens):
        lines.append(f"{_LENGTH_MARK} beyond the lengths measured: calculated from the nearest")
    return lines


def break_even_text(tokens: float, *, measured: bool) -> str:
    """Return a break-even length as text; "any" for 0, marked if it was extrapolated."""
    if tokens <= 0:
        return "any"
    rounded = max(1, round(tokens))
    return f"{'' if measured else _LENGTH_MARK}{rounded}"


def _on_nodes(found: CopyMeasurements) -> bool:
    return any(point.numa_node is not None for point in found.points)


def _copy_rows(found: CopyMeasurements) -> Iterator[list[str]]:
    for point in found.points:
        node = NOT_MEASURED if point.numa_node is None else str(point.numa_node)
        yield [
            point.how,
            format_bytes(point.request_bytes),
            str(point.in_flight),
            *([node] if _on_nodes(found) else []),
            _giga(point.out_alone_bytes_per_s),
            _giga(point.back_alone_bytes_per_s),
            _giga(point.out_bytes_per_s),
            _giga(point.back_bytes_per_s),
        ]


def _overlap_rows(found: OverlapMeasurements) -> Iterator[list[str]]:
    for point in found.points:
        yield [
            format_tokens(point.tokens),
            format_tokens(point.context),
            format_duration(point.compute_s),
            format_duration(point.copy_s),
            format_duration(point.exposed_s),
            f"{point.slowdown:+.1%}",
            f"{point.products_copying_s / point.products_s - 1:+.1%}",
            f"{point.attention_copying_s / point.attention_s - 1:+.1%}",
        ]


def _break_even_rows(found: tuple[BreakEven, ...]) -> Iterator[list[str]]:
    for row in found:
        yield [
            format_tokens(row.context),
            break_even_text(row.everything_tokens, measured=row.everything_measured),
            break_even_text(row.kept_tokens, measured=row.kept_measured),
        ]


def _giga(rate: float) -> str:
    value = rate / 1e9
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"
