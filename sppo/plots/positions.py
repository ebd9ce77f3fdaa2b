"""Plots of loss against position in the context: of one evaluation, or of all validations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sppo.output_file import write_figure
from sppo.plots.frame import BLUE, PALE_BLUE, QUIET, SMALL_PT, clean_axes, new_figure, write_title
from sppo.units import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Fractions of the figure: left edge, bottom edge, width, height.
_AREA = (0.07, 0.13, 0.88, 0.66)
_BETWEEN = 0.06
"""Fraction of the width of the figure between two panels."""
_ROOM = 0.15
"""Fraction of the range of losses that is left free above and below."""
_MOST_COLUMNS = 16
"""Most columns of a figure whose losses are written beside them."""

Curves = Mapping[str, Sequence[float]]
"""Mean loss of each bin of positions, NaN without labels, by the name of the curve, in order."""


def position_plot(
    path: Path,
    panels: Mapping[str, tuple[Sequence[int], Curves]],
    *,
    facts: Sequence[str],
) -> None:
    """Draw the loss by position into `path`, a PNG of 1600 by 900 pixels.

    Each bin of positions is one column. All columns are equally wide although each bin has twice
    the positions of the bin before, so that the far end of the context is as visible as its
    beginning. Later curves are darker; the last one has numbers.

    Args:
        path: File to write.
        panels: First position of each bin and the end of the last bin, and the curves, by the name
            of their token data.
        facts: What is written below the title.

    Raises:
        OSError: The file cannot be written.
    """
    figure = new_figure()
    left, bottom, width, height = _AREA
    step = (width + _BETWEEN) / len(panels)
    xlabel = "position in the context, tokens (columns double in length)"
    for place, (name, (edges, curves)) in enumerate(panels.items()):
        axes = figure.add_axes((left + place * step, bottom, step - _BETWEEN, height))
        _draw_curves(axes, edges, curves, panels=len(panels))
        if place == len(panels) - 1 and len(curves) > 1:
            _name_curves(axes, curves)
        clean_axes(
            axes,
            name if len(panels) > 1 else "loss, nats per token",
            xlabel=xlabel if len(panels) == 1 else "position, tokens",
        )
    title = "Loss by position in the context"
    write_title(figure, title + (", nats per token" * (len(panels) > 1)), facts, left=left)
    write_figure(path, figure)


def _draw_curves(axes: Axes, edges: Sequence[int], curves: Curves, *, panels: int) -> None:
    """Draw the curves of one of so many panels, from pale to dark."""
    columns, count = len(edges) - 1, len(curves)
    bottom, top = _limits([v for own in curves.values() for v in own if math.isfinite(v)])
    axes.set_ylim(bottom, top)
    axes.set_xlim(-0.1, columns + 0.1)
    for number, losses in enumerate(curves.values(), start=1):
        width = 2.8 if number in (1, count) else 1.3
        _draw_columns(axes, losses, colour=_shade(number / count), width=width, bottom=bottom)
    if columns * panels <= _MOST_COLUMNS:
        _write_losses(axes, losses, offset_pt=5 if count == 1 else -13)
    shown = range(0, len(edges), panels)
    axes.set_xticks(shown, [format_tokens(edges[place]) for place in shown])


def _name_curves(axes: Axes, curves: Curves) -> None:
    """Write the names of the first and the last curve above the axes."""
    names = list(curves)
    for name, share in ((names[0], 1 / len(names)), (names[-1], 1.0)):
        axes.plot([], [], color=_shade(share), lw=2.8, label=name)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),  # above the axes
        borderaxespad=0.2,
        ncols=2,
        fontsize=SMALL_PT,
        frameon=False,
        labelcolor=QUIET,
    )


def _shade(share: float) -> str:
    """Return a colour between pale and dark blue."""
    from matplotlib.colors import to_hex, to_rgb

    pale, dark = to_rgb(PALE_BLUE), to_rgb(BLUE)
    red, green, blue = (p + (d - p) * share for p, d in zip(pale, dark, strict=True))
    return to_hex((red, green, blue))


def _draw_columns(
    axes: Axes, losses: Sequence[float], *, colour: str, width: float, bottom: float
) -> None:
    for column, loss in enumerate(losses):
        if not math.isfinite(loss):
            axes.text(column + 0.5, bottom, "NaN", ha="center", va="bottom", color=QUIET)
            continue
        if column:
            axes.plot([column, column], [losses[column - 1], loss], color=PALE_BLUE, lw=1.1)
        axes.plot([column, column + 1], [loss] * 2, color=colour, lw=width)


def _write_losses(axes: Axes, losses: Sequence[float], *, offset_pt: float) -> None:
    """Write losses beside their columns, `offset_pt` above them."""
    for column, loss in enumerate(losses):
        if math.isfinite(loss):
            axes.annotate(
                f"{loss:.3f}",
                (column + 0.5, loss),
                textcoords="offset points",
                xytext=(0, offset_pt),
                ha="center",
                color=BLUE,
                fontsize=SMALL_PT,
            )


def _limits(losses: list[float]) -> tuple[float, float]:
    """Return the range of the loss axis. It does not start at 0, so that small differences show."""
    if not losses:
        return 0.0, 1.0
    spread = max(max(losses) - min(losses), 0.02 * abs(max(losses)), 1e-6)
    return min(losses) - _ROOM * spread, max(losses) + _ROOM * spread
