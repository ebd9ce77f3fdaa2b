"""Plot of how step time and memory grow with the length of a sequence, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo.output_file import write_figure
from sppo.plots.frame import BLUE, QUIET, SMALL_PT, clean_axes, new_figure, write_title
from sppo.units import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _BOTTOM, _PANEL_WIDTH, _HEIGHT, _BETWEEN = 0.07, 0.13, 0.38, 0.64, 0.12
"""Fractions of the figure."""
_COLOURS = (QUIET, BLUE)
"""Colours of the sides, the first again after the last."""
_PANELS = {
    "time of a step, s": ("step_s", 1.0),
    "peak memory of tensors, GiB; lines: predicted": ("tensors_peak_bytes", 2.0**-30),
}
"""Key of a figure, and the factor to its unit, by the title of its panel."""


def growth_plot(path: Path, sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw a PNG of 1600 by 900 pixels: time, and memory with its prediction, by length.

    Args:
        path: File to write.
        sides: Rows of each side by length, with the keys step_s, tensors_peak_bytes and
            predicted_peak_bytes.

    Raises:
        OSError: The file cannot be written.
    """
    figure = new_figure()
    for place, (title, (key, factor)) in enumerate(_PANELS.items()):
        left = _LEFT + place * (_PANEL_WIDTH + _BETWEEN)
        axes = figure.add_axes((left, _BOTTOM, _PANEL_WIDTH, _HEIGHT))
        line_key = "predicted_peak_bytes" if key == "tensors_peak_bytes" else key
        for number, (side, rows) in enumerate(sides.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            lengths = [row["length_tokens"] for row in rows]
            name = side.removeprefix("sppo ")
            axes.plot(lengths, [row[line_key] * factor for row in rows], color=colour, lw=2.2)
            axes.plot(lengths, [row[key] * factor for row in rows], "o", color=colour, label=name)
            _write_last(axes, lengths[-1], rows[-1][key] * factor, colour)
        axes.legend(loc="upper left", frameon=False, fontsize=SMALL_PT, labelcolor=QUIET)
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.set_xlim(0, lengths[-1] * 1.05)
        axes.set_xticks(lengths, [format_tokens(length) for length in lengths])
        clean_axes(axes, title, xlabel="tokens of a sequence")
    names = " and ".join(side.removeprefix("sppo ") for side in sides)
    facts = ["measured on a CPU", "one step of each length"]
    write_title(figure, f"Growth with length: {names}", facts, left=_LEFT)
    write_figure(path, figure)


def _write_last(axes: Axes, length: int, value: float, colour: str) -> None:
    """Write the last value of a side above its point."""
    axes.annotate(
        f"{value:.3g}",
        (length, value),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        color=colour,
        fontsize=SMALL_PT,
    )
