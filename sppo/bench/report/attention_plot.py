"""Panels of a plot: attention with the back end that ``auto`` chooses, and with all back ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sppo.bench.attention_backends import BackendComparison, BackendRate
from sppo.bench.report.figures import flops_unit
from sppo.bench.report.panels import COLOURS, Label, coloured_dtypes, token_axis, write_labels
from sppo.hardware.rates import AttentionPoint
from sppo.units import format_tokens

_LEGEND = "keys; forward solid, backward dotted"


def draw_attention(axes: Any, *, points: tuple[AttentionPoint, ...]) -> None:
    """Draw rate against keys at the smallest head size, a line per dtype and number of queries."""
    size = min(point.head_size for point in points)
    chosen = [point for point in points if point.head_size == size]
    unit, name = flops_unit(point.forward_flops_per_s for point in chosen)
    axes.set_title(f"attention, head size {size}, {name}", loc="left")
    labels = []
    for colour, dtype in coloured_dtypes(chosen):
        for queries in sorted({p.queries for p in chosen if p.dtype == dtype}):
            row = [p for p in chosen if (p.dtype, p.queries) == (dtype, queries)]
            text = f"{dtype}, {format_tokens(queries)} queries"
            keys = [point.keys for point in row]
            labels.append(_draw_line(axes, keys, row, unit=unit, text=text, colour=colour))
    token_axis(axes, sorted({p.keys for p in chosen}), _LEGEND)
    write_labels(axes, labels)


def draw_backends(axes: Any, *, found: BackendComparison) -> None:
    """Draw rate against keys, a line per back end, for the shapes with the most back ends."""
    chosen = _most_compared(found)
    shape = chosen[0].shape
    unit, name = flops_unit(rate.forward_flops_per_s for rate in chosen)
    axes.set_title(
        f"attention back ends: {shape.dtype}, {format_tokens(shape.queries)} queries, "
        f"{shape.heads} heads of {shape.head_size}, {name}",
        loc="left",
    )
    labels = []
    for index, backend in enumerate(found.backends):
        row = sorted(
            (rate for rate in chosen if rate.backend == backend), key=lambda rate: rate.shape.keys
        )
        if row:
            keys, colour = [rate.shape.keys for rate in row], COLOURS[index % len(COLOURS)]
            labels.append(_draw_line(axes, keys, row, unit=unit, text=backend, colour=colour))
    token_axis(axes, sorted({rate.shape.keys for rate in chosen}), _LEGEND)
    write_labels(axes, labels)


def _most_compared(found: BackendComparison) -> list[BackendRate]:
    """Return a group of rates that differ in back end and keys only.

    The group has the most back ends; ties are decided by the number of keys, then by the FLOPs.
    """
    groups: dict[tuple[object, ...], list[BackendRate]] = {}
    for rate in found.rates:
        shape = rate.shape
        key = (shape.dtype, shape.queries, shape.heads, shape.head_size)
        groups.setdefault(key, []).append(rate)

    def worth(rates: list[BackendRate]) -> tuple[int, int, int]:
        backends = {rate.backend for rate in rates}
        shapes = {rate.shape for rate in rates}
        return len(backends), len(shapes), max(shape.forward_flops for shape in shapes)

    return max(groups.values(), key=worth)


def _draw_line(
    axes: Any,
    keys: Sequence[int],
    row: Sequence[AttentionPoint] | Sequence[BackendRate],
    *,
    unit: float,
    text: str,
    colour: str,
) -> Label:
    """Draw forward and backward of points that differ in keys only; return the forward's label."""
    forward = [point.forward_flops_per_s / unit for point in row]
    backward = [point.backward_flops_per_s / unit for point in row]
    axes.plot(keys, forward, color=colour, lw=1.6, marker="o", ms=3)
    axes.plot(keys, backward, color=colour, lw=1.0, ls=":", marker="o", ms=3)
    return Label(keys[-1], forward[-1], text, colour)
