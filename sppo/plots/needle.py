"""Plot of needles found, by length of the document and depth of the needle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sppo.output_file import write_figure
from sppo.plots.frame import INK, QUIET, SMALL_PT, clean_axes, new_figure, write_title
from sppo.units import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Fractions of the figure: left edge, bottom edge, width, height.
_AREA = (0.07, 0.13, 0.88, 0.66)
_COLOURS = "Blues"
"""From light to dark in one hue, so that shades can be told apart without seeing colours."""
_WHITE_FROM = 0.7
"""Share from which cells are dark, and their text is white."""
_POINTS_PER_INCH = 72
_LARGEST_PT, _SMALLEST_PT = 13.0, 4.0


def needle_plot(
    path: Path, *, shares: Mapping[tuple[int, int], float], facts: Sequence[str]
) -> None:
    """Draw the share of needles that were found into `path`, a PNG of 1600 by 900 pixels.

    Each length is a column and each depth a row, with the share in percent in every cell.

    Args:
        path: File to write.
        shares: Share of the needles that were found, by length of the document and depth.
        facts: What is written below the title.

    Raises:
        OSError: The file cannot be written.
    """
    lengths = sorted({length for length, _ in shares})
    depths = sorted({depth for _, depth in shares})
    table = np.full((len(depths), len(lengths)), np.nan)
    for (length, depth), share in shares.items():
        table[depths.index(depth), lengths.index(length)] = share
    figure = new_figure()
    axes = figure.add_axes(_AREA)
    axes.imshow(table, cmap=_COLOURS, vmin=0, vmax=1, aspect="auto")
    size_pt = _text_pt(figure, rows=len(depths), columns=len(lengths))
    for (row, column), share in np.ndenumerate(table):
        if np.isfinite(share) and size_pt >= _SMALLEST_PT:
            colour = "white" if share >= _WHITE_FROM else INK
            text = f"{100 * share:.0f}"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=size_pt)
    every = max(1, len(depths) // 12)
    axes.set_xticks(range(len(lengths)), [format_tokens(length) for length in lengths])
    axes.set_yticks(range(0, len(depths), every), [f"{depth} %" for depth in depths[::every]])
    _draw_gaps(axes, rows=len(depths), columns=len(lengths))
    clean_axes(
        axes,
        "needles found, percent, by depth of the needle in the text",
        xlabel="length of the document, tokens",
        has_grid=False,
    )
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(labelcolor=QUIET, labelsize=SMALL_PT + 1)
    write_title(figure, "Needles by length and depth", facts, left=_AREA[0])
    write_figure(path, figure)


def _draw_gaps(axes: Axes, *, rows: int, columns: int) -> None:
    """Draw white lines between cells."""
    axes.set_xticks(np.arange(columns - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(rows - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="minor", length=0)


def _text_pt(figure: Figure, *, rows: int, columns: int) -> float:
    """Return the size of the text of a cell: half its height, and a quarter of its width."""
    width = figure.get_figwidth() * _AREA[2] / columns
    height = figure.get_figheight() * _AREA[3] / rows
    return min(_LARGEST_PT, _POINTS_PER_INCH * height / 2, _POINTS_PER_INCH * width / 4)
