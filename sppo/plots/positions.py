"""Plots of loss against position in the context: of one evaluation, or of all validations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sppo.output_file import write_figure
from sppo.plots.frame import BLUE, PALE_BLUE, QUIET, SMALL_PT, clean_axes, new_figure, write_title
from sppo.report.metrics import read_records
from sppo.report.validation import ValidationMetrics
from sppo.units import counted, format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Fractions of the figure: left edge, bottom edge, width, height.
_AREA = (0.07, 0.13, 0.88, 0.66)
_BETWEEN = 0.06
"""Fraction of the width of the figure between two panels."""
_ROOM = 0.15
"""Fraction of the range of losses that is left free above and below."""
_MOST_PANELS = 3
_MOST_EDGES = 17
"""Most edges of the bins of a figure whose losses are written beside them."""


class Bin(Protocol):
    """Mean loss of the labels of tokens at positions ``[start, end)`` in the context."""

    @property
    def start(self) -> int:
        """First position."""

    @property
    def end(self) -> int:
        """Position after the last."""

    @property
    def loss(self) -> float:
        """Mean loss; may be NaN."""


Curves = Mapping[str, Sequence[Bin]]
"""Bins that have labels, by the name of the curve, in order."""


def position_plot(path: Path, panels: Mapping[str, Curves], *, facts: Sequence[str]) -> None:
    """Draw the loss by position into `path`, a PNG of 1600 by 900 pixels.

    Each bin of positions is one column. All columns are equally wide although each bin has twice
    the positions of the bin before, so that the far end of the context is as visible as its
    beginning. Later curves are darker; the last one has numbers.

    Args:
        path: File to write.
        panels: Curves by the name of their token data.
        facts: What is written below the title.

    Raises:
        OSError: The file cannot be written.
    """
    figure = new_figure()
    left, bottom, width, height = _AREA
    step = (width + _BETWEEN) / len(panels)
    xlabel = "position in the context, tokens (columns double in length)"
    for place, (name, curves) in enumerate(panels.items()):
        axes = figure.add_axes((left + place * step, bottom, step - _BETWEEN, height))
        _draw_curves(axes, curves, panels=len(panels))
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


def validations_plot(validation_path: Path, png_path: Path) -> None:
    """Draw the validations recorded in ``validation_path``: a panel for each of up to three sets.

    Sets with several ranges of positions come first.

    Args:
        validation_path: Path of the run's ``validation.jsonl``.
        png_path: Path of the file to write.

    Raises:
        ValueError: There is no validation yet.
        OSError: ``png_path`` cannot be written.
    """
    records = read_records(validation_path, ValidationMetrics)
    if not records:
        raise ValueError(f"{validation_path} holds no validation yet")
    panels: dict[str, dict[str, Sequence[Bin]]] = {}
    for record in sorted(records, key=lambda record: record.step):
        panels.setdefault(record.set, {})[f"step {record.step}"] = record.by_position
    count = len({record.step for record in records})
    several = {name: curves for name, curves in panels.items() if _are_several(curves)}
    panels = dict(list({**several, **panels}.items())[:_MOST_PANELS])
    facts = [validation_path.absolute().parent.name, counted(count, "validation")]
    position_plot(png_path, panels, facts=facts)


def _are_several(curves: Curves) -> bool:
    return any(len(bins) > 1 for bins in curves.values())


def _draw_curves(axes: Axes, curves: Curves, *, panels: int) -> None:
    """Draw the curves of one of so many panels, from pale to dark."""
    every = [own for bins in curves.values() for own in bins]
    edges = sorted({own.start for own in every} | {own.end for own in every})
    columns = {edge: column for column, edge in enumerate(edges)}
    bottom, top = _limits([own.loss for own in every if math.isfinite(own.loss)])
    axes.set_ylim(bottom, top)
    axes.set_xlim(-0.1, len(edges) - 0.9)
    for number, bins in enumerate(curves.values(), start=1):
        losses = {columns[own.start]: own.loss for own in bins}
        width = 2.8 if number in (1, len(curves)) else 1.3
        colour = _shade(number / len(curves))
        _draw_columns(axes, losses, colour=colour, width=width, bottom=bottom)
        if number == len(curves) and len(edges) * panels <= _MOST_EDGES:
            _write_losses(axes, losses, offset_pt=5 if number == 1 else -13)
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
    axes: Axes, losses: Mapping[int, float], *, colour: str, width: float, bottom: float
) -> None:
    """Draw losses by column; columns without labels stay empty."""
    for column, loss in losses.items():
        if not math.isfinite(loss):
            axes.text(column + 0.5, bottom, "NaN", ha="center", va="bottom", color=QUIET)
            continue
        if column - 1 in losses:
            axes.plot([column, column], [losses[column - 1], loss], color=PALE_BLUE, lw=1.1)
        axes.plot([column, column + 1], [loss] * 2, color=colour, lw=width)


def _write_losses(axes: Axes, losses: Mapping[int, float], *, offset_pt: float) -> None:
    """Write losses beside their columns, `offset_pt` above them."""
    for column, loss in losses.items():
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
