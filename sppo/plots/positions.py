"""Plot of loss against position in the context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sppo.output_file import write_figure
from sppo.plots.frame import BLUE, PALE_BLUE, QUIET, SMALL_PT, clean_axes, new_figure, write_title
from sppo.units import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Fractions of the figure: left edge, bottom edge, width, height.
_AREA = (0.07, 0.13, 0.88, 0.66)
_ROOM = 0.15
"""Fraction of the range of losses that is left free above and below."""


def position_plot(
    path: Path, *, edges: Sequence[int], losses: Sequence[float], facts: Sequence[str]
) -> None:
    """Draw the loss by position into `path`, a PNG of 1600 by 900 pixels.

    Each bin of positions is one column. All columns are equally wide although each bin has twice
    the positions of the bin before, so that the far end of the context is as visible as its
    beginning.

    Args:
        path: File to write.
        edges: First position of each bin, and the end of the last bin.
        losses: Mean loss of each bin, [len(edges) - 1]; NaN for a bin without labels.
        facts: What is written below the title.

    Raises:
        OSError: The file cannot be written.
    """
    figure = new_figure()
    axes = figure.add_axes(_AREA)
    _draw_columns(axes, edges, losses)
    clean_axes(
        axes,
        "loss, nats per token",
        xlabel="position in the context, tokens (columns double in length)",
    )
    write_title(figure, "Loss by position in the context", facts, left=_AREA[0])
    write_figure(path, figure)


def _draw_columns(axes: Axes, edges: Sequence[int], losses: Sequence[float]) -> None:
    bottom, top = _limits([loss for loss in losses if math.isfinite(loss)])
    axes.set_ylim(bottom, top)
    axes.set_xlim(-0.1, len(losses) + 0.1)
    for column, loss in enumerate(losses):
        if not math.isfinite(loss):
            axes.text(column + 0.5, bottom, "NaN", ha="center", va="bottom", color=QUIET)
            continue
        if column:
            axes.plot([column, column], [losses[column - 1], loss], color=PALE_BLUE, lw=1.1)
        axes.plot([column, column + 1], [loss] * 2, color=BLUE, lw=2.8)
        axes.annotate(
            f"{loss:.3f}",
            (column + 0.5, loss),
            textcoords="offset points",
            xytext=(0, 5),
            ha="center",
            color=BLUE,
            fontsize=SMALL_PT,
        )
    axes.set_xticks(range(len(edges)), [format_tokens(edge) for edge in edges])


def _limits(losses: list[float]) -> tuple[float, float]:
    """Return the range of the loss axis. It does not start at 0, so that small differences show."""
    if not losses:
        return 0.0, 1.0
    spread = max(max(losses) - min(losses), 0.02 * abs(max(losses)), 1e-6)
    return min(losses) - _ROOM * spread, max(losses) + _ROOM * spread
