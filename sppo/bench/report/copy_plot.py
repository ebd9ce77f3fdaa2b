"""Panels of a plot: rates of copies by request size, and times of copies and their compute."""

from __future__ import annotations

from typing import Any

from sppo.bench.break_even import OverlapPoint
from sppo.bench.copies import CopyMeasurements, CopyPoint
from sppo.bench.overlap import OverlapMeasurements
from sppo.bench.report.panels import COLOURS, GRID, Label, headroom, token_axis, write_labels
from sppo.units import MIB, format_bytes, format_tokens


def draw_copies(axes: Any, *, found: CopyMeasurements) -> None:
    """Draw rate against request size, a colour per kind of copy.

    Lines are solid for both directions at once and dotted for one direction alone.
    """
    names = ("write", "read") if found.tier == "disk" else ("D2H", "H2D")
    axes.set_title(f"{found.tier} tier, GB/s", loc="left")
    labels: list[Label] = []
    ways = list(dict.fromkeys(_way(point) for point in found.points))
    sizes = sorted({point.request_bytes for point in found.points})
    for index, way in enumerate(ways):
        row = sorted(
            (point for point in found.points if _way(point) == way), key=lambda p: p.request_bytes
        )
        x = [point.request_bytes / MIB for point in row]
        colour = COLOURS[index % len(COLOURS)]
        for direction, marker in (("out", "o"), ("back", "s")):
            both = [getattr(point, f"{direction}_bytes_per_s") / 1e9 for point in row]
            alone = [getattr(point, f"{direction}_alone_bytes_per_s") / 1e9 for point in row]
            axes.plot(x, both, color=colour, lw=1.6, marker=marker, ms=4)
            axes.plot(x, alone, color=colour, lw=1.0, ls=":", marker=marker, ms=4)
            name = names[0 if direction == "out" else 1]
            labels.append(Label(x[-1], both[-1], f"{name}, {way}", colour))
            if found.tier == "disk":
                labels.append(Label(x[-1], alone[-1], f"{name} alone, {way}", colour))
    axes.set_xscale("log", base=2)
    axes.set_xticks([size / MIB for size in sizes], [format_bytes(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / MIB / 1.5, sizes[-1] / MIB * 12)
    headroom(axes)
    axes.set_xlabel("request; both at once solid, alone dotted")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    write_labels(axes, labels)


def _way(point: CopyPoint) -> str:
    """Return the name of a point's line, which is common to all points that differ in size only."""
    node = "" if point.numa_node is None else f", node {point.numa_node}"
    return f"{point.in_flight} in flight" if point.how == "disk" else f"{point.how}{node}"


def draw_overlap(axes: Any, *, found: OverlapMeasurements) -> None:
    """Draw time per token against subsequence length: a line per context, and one of the copy.

    The copy is hidden at lengths where the copy's line is below the line of the context.
    """
    axes.set_title(f"copies behind a layer of {found.model}, us per token", loc="left")
    labels: list[Label] = []
    lengths = sorted({point.tokens for point in found.points})
    for index, context in enumerate(sorted({point.context for point in found.points})):
        row = _row(found.points, context)
        x, colour = [point.tokens for point in row], COLOURS[index % len(COLOURS)]
        axes.plot(x, [_us(p, p.compute_copying_s) for p in row], color=colour, lw=1.6, marker="o")
        axes.plot(x, [_us(p, p.compute_s) for p in row], color=colour, lw=1.0, ls=":")
        last = row[-1]
        text = f"compute after {format_tokens(context)}"
        labels.append(Label(x[-1], _us(last, last.compute_copying_s), text, colour))
    row = _row(found.points, min(point.context for point in found.points))
    copies = [_us(point, point.copy_s) for point in row]
    axes.plot([p.tokens for p in row], copies, color="#222222", lw=2.2, marker="s", ms=4)
    labels.append(Label(row[-1].tokens, copies[-1], "copy of everything saved", "#222222"))
    axes.set_yscale("log")
    token_axis(axes, lengths, "tokens; with copies solid, alone dotted", from_zero=False)
    write_labels(axes, labels)


def _row(points: tuple[OverlapPoint, ...], context: int) -> list[OverlapPoint]:
    return sorted((p for p in points if p.context == context), key=lambda p: p.tokens)


def _us(point: OverlapPoint, seconds: float) -> float:
    return seconds * 1e6 / point.tokens
