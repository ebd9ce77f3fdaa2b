"""Plot of loss against position in the context."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sppo.output_file import write_figure
from sppo.training.evaluation import Evaluation, PositionLoss
from sppo.units import format_count, format_tokens

_LINE, _PALE = "#1f5fa8", "#a9c7e8"
_INK, _QUIET, _GRID = "#222222", "#6b6b6b", "#e6e6e6"
_SMALL_PT, _TITLE_PT = 9, 15

# Fractions of the figure: left edge, bottom edge, width, height.
_AREA = (0.07, 0.13, 0.88, 0.66)
_ROOM = 0.15
"""Fraction of the range of losses that is left free above and below."""


def position_plot(result: Evaluation, path: Path) -> None:
    """Draw the loss by position into `path`, a PNG of 1600 by 900 pixels.

    Each bin of positions is one column. All columns are equally wide although each bin has twice
    the positions of the bin before, so that the far end of the context is as visible as its
    beginning.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.625), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes(_AREA)
    _draw_columns(axes, result.by_position)
    _clean(axes)
    _write_title(figure, result)
    write_figure(path, figure)


def _draw_columns(axes: Any, rows: tuple[PositionLoss, ...]) -> None:
    bottom, top = _limits([row.loss for row in rows if math.isfinite(row.loss)])
    axes.set_ylim(bottom, top)
    axes.set_xlim(-0.1, len(rows) + 0.1)
    for column, row in enumerate(rows):
        if not math.isfinite(row.loss):
            axes.text(column + 0.5, bottom, "NaN", ha="center", va="bottom", color=_QUIET)
            continue
        if column:
            axes.plot([column, column], [rows[column - 1].loss, row.loss], color=_PALE, lw=1.1)
        axes.plot([column, column + 1], [row.loss] * 2, color=_LINE, lw=2.8)
        axes.annotate(
            f"{row.loss:.3f}",
            (column + 0.5, row.loss),
            textcoords="offset points",
            xytext=(0, 5),
            ha="center",
            color=_LINE,
            fontsize=_SMALL_PT,
        )
    edges = [row.start for row in rows] + [rows[-1].end]
    axes.set_xticks(range(len(edges)), [format_tokens(edge) for edge in edges])


def _limits(losses: list[float]) -> tuple[float, float]:
    """Return the range of the loss axis. It does not start at 0, so that small differences show."""
    if not losses:
        return 0.0, 1.0
    spread = max(max(losses) - min(losses), 0.02 * abs(max(losses)), 1e-6)
    return min(losses) - _ROOM * spread, max(losses) + _ROOM * spread


def _clean(axes: Any) -> None:
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.tick_params(colors=_QUIET, labelsize=_SMALL_PT, length=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title("loss, nats per token", loc="left", color=_INK, fontsize=_SMALL_PT + 1, pad=10)
    axes.set_xlabel(
        "position in the context, tokens (columns double in length)",
        color=_INK,
        fontsize=_SMALL_PT + 1,
    )


def _write_title(figure: Any, result: Evaluation) -> None:
    kind = "held-out" if result.held_out else "training"
    facts = (
        f"loss {result.loss:.3f}",
        f"perplexity {result.perplexity:.2f}",
        f"{format_count(result.num_tokens)} {kind} tokens of {result.tokens_from}",
        f"weights of step {result.step}",
    )
    left = _AREA[0]
    title = "Loss by position in the context"
    figure.text(left, 0.938, title, color=_INK, fontsize=_TITLE_PT, fontweight="bold")
    below = figure.text(left, 0.897, "  ·  ".join(facts), color=_QUIET, fontsize=_SMALL_PT + 1)
    below.set_parse_math(False)  # a directory name may contain $
