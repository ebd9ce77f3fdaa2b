"""Plot of document lengths: the share of documents, and of tokens, above each length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sppo.data.samples.length_stats import DocumentLengths, LengthStats, LimitStats
from sppo.output_file import write_figure
from sppo.plots.frame import (
    BLUE,
    INK,
    ORANGE,
    clean_axes,
    new_figure,
    show_legend,
    write_title,
)
from sppo.units import format_count, format_tokens

# Fractions of the figure: left edge, bottom edge, width, height.
_AREA = (0.07, 0.13, 0.86, 0.66)
_MOST_POINTS = 1000
_MOST_MARKS = 14
"""Largest number of marks on the axis of lengths."""


def length_plot(stats: LengthStats, distribution: DocumentLengths, path: Path) -> None:
    """Draw the distribution of document lengths into `path`, a PNG of 1600 by 900 pixels.

    Two curves over the length: the share of documents that are longer, and the share of all tokens
    in these documents.

    Raises:
        OSError: The file cannot be written.
    """
    figure = new_figure()
    axes = figure.add_axes(_AREA)
    _draw_curves(axes, distribution)
    if stats.limit is not None:
        _draw_limit(axes, stats.limit)
    clean_axes(
        axes,
        "share of documents that are longer, and share of tokens in those",
        xlabel="length, tokens",
        grid="both",
    )
    _mark_lengths(axes, longest=max(2, stats.longest))
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    show_legend(axes, loc="lower left")  # both curves are near 100 % there
    write_title(figure, "Lengths of documents", _facts(stats), left=_AREA[0])
    write_figure(path, figure)


def _draw_curves(axes: Any, distribution: DocumentLengths) -> None:
    """Draw falling steps at every length that occurs, or at 1000 lengths if more occur."""
    at = np.unique(distribution.lengths)
    if len(at) > _MOST_POINTS:
        at = np.unique(np.geomspace(1, at[-1], _MOST_POINTS).astype(np.int64))
    at = np.concatenate([[1], at[at > 1]])
    shares = np.array([distribution.shares_longer(int(length)) for length in at])
    for column, (name, colour) in enumerate((("documents", BLUE), ("tokens", ORANGE))):
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
    axes.axvline(limit.length, color=INK, lw=1.2, ls=(0, (4, 3)), label=text)


def _mark_lengths(axes: Any, *, longest: int) -> None:
    """Make the horizontal axis one of lengths from 1 to `longest`, marked at powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, longest * 1.15)
    every = 1 + (longest.bit_length() + 1) // _MOST_MARKS
    marks = [1 << power for power in range(0, longest.bit_length(), every)]
    axes.set_xticks(marks, [format_tokens(mark) for mark in marks])
    axes.set_xticks([], minor=True)


def _facts(stats: LengthStats) -> list[str]:
    return [
        f"{format_count(stats.num_documents)} documents",
        f"{format_count(stats.num_tokens)} tokens",
        f"mean {format_count(stats.mean_length)}",
        f"median {format_count(stats.length_percentiles['p50'])}",
        f"longest {format_count(stats.longest)}",
        stats.directory,
    ]
