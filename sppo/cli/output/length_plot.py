"""Plot of document lengths: the share of documents, and of tokens, above each length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sppo.data.samples.length_stats import DocumentLengths, LengthStats, LimitStats
from sppo.output_file import write_figure
from sppo.units import format_count, format_tokens

_DOCUMENTS, _TOKENS = "#1f5fa8", "#c2571a"
_INK, _QUIET, _GRID = "#222222", "#6b6b6b", "#e6e6e6"
_SMALL_PT, _TITLE_PT = 9, 15

# Fractions of the figure: left edge, bottom edge, width, height.
_AREA = (0.07, 0.13, 0.86, 0.66)
_MOST_POINTS = 1000


def length_plot(stats: LengthStats, distribution: DocumentLengths, path: Path) -> None:
    """Draw the distribution of document lengths into `path`, a PNG of 1600 by 900 pixels.

    Two curves over the length: the share of documents that are longer, and the share of all tokens
    in these documents.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.625), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes(_AREA)
    _draw_curves(axes, distribution)
    if stats.limit is not None:
        _draw_limit(axes, stats.limit)
    _draw_legend(axes)
    _clean(axes, longest=max(2, stats.longest))
    _write_title(figure, stats)
    write_figure(path, figure)


def _draw_curves(axes: Any, distribution: DocumentLengths) -> None:
    """Draw falling steps at every length that occurs, or at 1000 lengths if more occur."""
    at = np.unique(distribution.lengths)
    if len(at) > _MOST_POINTS:
        at = np.unique(np.geomspace(1, at[-1], _MOST_POINTS).astype(np.int64))
    at = np.concatenate([[1], at[at > 1]])
    shares = np.array([distribution.shares_longer(int(length)) for length in at])
    for column, (name, colour) in enumerate((("documents", _DOCUMENTS), ("tokens", _TOKENS))):
        axes.plot(
            at,
            shares[:, column],
            color=colour,
            lw=2.2,
            drawstyle="steps-post",
            label=f"{name} in longer documents" if column else f"longer {name}",
        )
        axes.fill_between(at, shares[:, column], step="post", color=colour, alpha=0.08, lw=0)


def _draw_limit(axes: Any, limit: LimitStats) -> None:
    """Draw a line at the length given by --length, with the shares above it in the legend."""
    text = (
        f"longer than {format_tokens(limit.length)}: {limit.longer_documents_share:.2%} of "
        f"documents, {limit.longer_tokens_share:.2%} of tokens"
    )
    axes.axvline(limit.length, color=_INK, lw=1.2, ls=(0, (4, 3)), label=text)


def _draw_legend(axes: Any) -> None:
    """Draw the legend at the lower left, where both curves are near 100 % and leave room."""
    axes.legend(
        loc="lower left",
        fontsize=_SMALL_PT,
        labelcolor=_INK,
        facecolor="white",
        edgecolor="none",
        framealpha=0.85,
    )


def _clean(axes: Any, *, longest: int) -> None:
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, longest * 1.1)
    powers = range(longest.bit_length() + 1)
    every = 1 + len(powers) // 14
    ticks = [1 << power for power in powers if power % every == 0 and 1 << power <= longest * 1.1]
    axes.set_xticks(ticks, [format_tokens(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.tick_params(colors=_QUIET, labelsize=_SMALL_PT, length=0)
    axes.grid(axis="both", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(
        "share of documents that are longer, and share of tokens in those",
        loc="left",
        color=_INK,
        fontsize=_SMALL_PT + 1,
        pad=10,
    )
    axes.set_xlabel("length, tokens", color=_INK, fontsize=_SMALL_PT + 1)


def _write_title(figure: Any, stats: LengthStats) -> None:
    facts = [
        f"{format_count(stats.num_documents)} documents",
        f"{format_count(stats.num_tokens)} tokens",
        f"mean {format_count(stats.mean_length)}",
        f"median {format_count(stats.length_percentiles['p50'])}",
        f"longest {format_count(stats.longest)}",
        stats.directory,
    ]
    left = _AREA[0]
    title = "Lengths of documents"
    figure.text(left, 0.938, title, color=_INK, fontsize=_TITLE_PT, fontweight="bold")
    below = figure.text(left, 0.897, "  ·  ".join(facts), color=_QUIET, fontsize=_SMALL_PT + 1)
    below.set_parse_math(False)  # a directory name may contain $
