"""Elements of all panels of a plot: colours, axes of tokens, labels at the ends of lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sppo.units import format_tokens

INK, QUIET, GRID = "#222222", "#6b6b6b", "#e6e6e6"
COLOURS = ("#1f5fa8", "#d1495b", "#2e8b57", "#b8860b", "#7b4fa3", "#008b8b", "#8c564b")
SMALL_PT = 8
_LABEL_HEIGHT = 0.035
"""Height of a label as a fraction of the panel's height."""
_HEADROOM = 1.1
_TITLE_CHARACTERS = 50
"""Longest line of a title, which is about as wide as a panel."""


@dataclass(frozen=True, slots=True)
class Label:
    """Name of a line, written at the line's end."""

    x: float
    y: float
    text: str
    colour: str


def coloured_dtypes(points: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield (colour, dtype) for every dtype of ``points``."""
    yield from zip(COLOURS, dict.fromkeys(point.dtype for point in points), strict=False)


def write_labels(axes: Any, labels: Sequence[Label]) -> None:
    """Write labels at the ends of lines, moved apart if they would overlap.

    The limits of the axes must be set before the call.
    """

    def height(label: Label) -> float:
        """Return a label's height as a fraction of the panel's, whatever the scale."""
        at = axes.transData.transform((label.x, label.y))
        return float(axes.transAxes.inverted().transform(at)[1])

    for x in {label.x for label in labels}:
        place = -_LABEL_HEIGHT
        for label in sorted((la for la in labels if la.x == x), key=height):
            place = max(height(label), place + _LABEL_HEIGHT)
            axes.annotate(
                label.text,
                (x, place),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                xytext=(5, 0),
                va="center",
                color=label.colour,
                fontsize=SMALL_PT - 1,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            )


def token_axis(axes: Any, tokens: list[int], label: str, *, from_zero: bool = True) -> None:
    """Set a logarithmic x axis of tokens with space for labels, and y from 0 if ``from_zero``."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [format_tokens(count) for count in tokens], rotation=45)
    axes.minorticks_off()
    axes.set_xlim(tokens[0] / 1.3, tokens[-1] * 3)
    if from_zero:
        headroom(axes)
    axes.set_xlabel(label)
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def headroom(axes: Any) -> None:
    """Set the limits of y from 0 to a little above the data."""
    axes.set_ylim(0, axes.get_ylim()[1] * _HEADROOM)


def clean(axes: Any) -> None:
    """Remove the frame except the bottom line, and set small, quiet text."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.tick_params(colors=QUIET, labelsize=SMALL_PT, length=0)
    axes.set_axisbelow(True)
    of_text = {"fontsize": SMALL_PT + 1, "color": INK}
    title = textwrap.fill(axes.get_title(loc="left"), _TITLE_CHARACTERS)
    axes.set_title(title, loc="left", fontdict=of_text)
    axes.set_xlabel(axes.get_xlabel(), fontdict=of_text)
