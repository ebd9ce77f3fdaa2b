"""Frame of every plot: its figure, its title, and axes with as little ink as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET = "#222222", "#6b6b6b"
BLUE, PALE_BLUE = "#1f5fa8", "#a9c7e8"
SMALL_PT = 9
_GRID, _AXIS = "#e6e6e6", "#bbbbbb"
_TITLE_PT = 15
_WIDTH_INCHES, _HEIGHT_INCHES, _DPI = 10, 5.625, 160
_TITLE_INCHES, _FACTS_INCHES, _LINE_INCHES = 0.345, 0.57, 0.2
"""Distance of the title and of the first line of facts from the top, and between two lines."""
_LINE_CHARACTERS = 115


def new_figure() -> Figure:
    """Return an empty figure, 1600 pixels wide and 900 pixels high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def write_title(figure: Figure, title: str, facts: Sequence[str], *, left: float) -> None:
    """Write the title and, in as many lines as they need, facts below it.

    `left` is the left edge as a fraction of the width.
    """
    height = figure.get_figheight()
    at = 1 - _TITLE_INCHES / height
    texts = [figure.text(left, at, title, color=INK, fontsize=_TITLE_PT, fontweight="bold")]
    lines: list[str] = []
    for fact in facts:
        joined = f"{lines[-1]}  ·  {fact}" if lines else ""
        lines[-1:] = [joined] if 0 < len(joined) <= _LINE_CHARACTERS else [*lines[-1:], fact]
    for number, line in enumerate(lines):
        at = 1 - (_FACTS_INCHES + number * _LINE_INCHES) / height
        texts.append(figure.text(left, at, line, color=QUIET, fontsize=SMALL_PT + 1))
    for text in texts:
        text.set_parse_math(False)  # the name of a directory may contain $


def clean_axes(
    axes: Axes,
    title: str,
    *,
    xlabel: str = "",
    has_grid: bool = True,
    colour: str = INK,
) -> None:
    """Give axes a title, a label below, a pale grid, and no box.

    Args:
        axes: Axes to change.
        title: What the axes show, and in which unit; written above them.
        xlabel: Meaning of the horizontal axis.
        has_grid: Whether to draw a horizontal line at each mark of the vertical axis.
        colour: Colour of the title.
    """
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_AXIS)
    axes.tick_params(colors=QUIET, labelsize=SMALL_PT, length=0)
    if has_grid:
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    axes.set_title(title, loc="left", color=colour, fontsize=SMALL_PT + 1, pad=8)
    axes.set_xlabel(xlabel, color=INK, fontsize=SMALL_PT + 1)
