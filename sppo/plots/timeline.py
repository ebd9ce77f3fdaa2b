"""Plot of timelines: one panel per schedule, one row per rank, memory below.

Rows are painted pixel by pixel, so that steps of any number of actions are drawn in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sppo.output_file import write_figure
from sppo.plots import timeline_style as style
from sppo.schedule.actions import ActionKind
from sppo.schedule.timeline import Lane, Span, Timeline
from sppo.units import KIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Legend = dict[str, dict[str, None]]
"""Colours of each kind of mark that is drawn, by name."""

_MOST_LABELS = 4_000
_WIDTH_INCHES = 15.0
_LEFT_INCHES, _RIGHT_INCHES = 0.85, 0.25
_PLOT_INCHES = _WIDTH_INCHES - _LEFT_INCHES - _RIGHT_INCHES
_GAP_INCHES, _MEMORY_INCHES = 0.42, 0.75
_DPI = 150
_PIXELS = round(_PLOT_INCHES * _DPI)
_LEAST_ROW_INCHES = 0.1
"""Height of a row from which on copies are drawn below compute."""
_EDGE_PIXELS = 8
"""Least width of a bar that ends with a white line."""
_MOST_MEMORY_LINES = 8
_LEGEND_CHARACTERS = 200
_COPY_ROWS: dict[Lane, tuple[float, float]] = {
    "compute": (0.04, 0.62),
    "d2h": (0.65, 0.78),
    "h2d": (0.8, 0.93),
}
"""Top and bottom of each lane that is drawn, in a row of height 1."""
_COMPUTE_ROWS: dict[Lane, tuple[float, float]] = {"compute": (0.04, 0.9)}


@dataclass(frozen=True, slots=True)
class _Panel:
    """Content and size of one schedule's panel."""

    timeline: Timeline
    is_abstract: bool
    rows_inches: float
    lanes: dict[Lane, tuple[float, float]]
    has_memory: bool

    @classmethod
    def of(cls, timeline: Timeline, *, is_abstract: bool) -> _Panel:
        """Return the panel of a timeline."""
        ranks = timeline.ranks
        copies = (ActionKind.D2H, ActionKind.H2D)
        has_copies = any(action.kind in copies for track in ranks for action in track.actions)
        rows_inches = min(max(len(ranks) * (0.48 if has_copies else 0.36), 0.5), 7.0)
        has_copies = has_copies and rows_inches / len(ranks) >= _LEAST_ROW_INCHES
        lanes = _COPY_ROWS if has_copies else _COMPUTE_ROWS
        has_memory = any(track.memory and track.memory["total"].peak_bytes > 0 for track in ranks)
        return cls(timeline, is_abstract, rows_inches, lanes, has_memory)


def write_png(path: Path, *, timelines: Sequence[Timeline], is_abstract: bool = False) -> None:
    """Draw `timelines` one below the other on one time axis, 2250 pixels wide.

    Args:
        path: File to write.
        timelines: At least one timeline.
        is_abstract: Whether times are multiples of one forward and memory is in multiples of one
            unit's, instead of seconds and bytes.

    Raises:
        OSError: A file that cannot be written.
    """
    from matplotlib.figure import Figure

    panels = [_Panel.of(timeline, is_abstract=is_abstract) for timeline in timelines]
    end_s = max(timeline.makespan_s for timeline in timelines) or 1.0
    legend: Legend = {}
    images = [_painted(panel, end_s, legend) for panel in panels]
    legend_rows = -(-sum(len(name) + 6 for name in legend) // _LEGEND_CHARACTERS)
    legend_inches = 0.05 + 0.2 * legend_rows
    memory = [_MEMORY_INCHES if panel.has_memory else 0.0 for panel in panels]
    panels_inches = sum(panel.rows_inches + _GAP_INCHES for panel in panels) + sum(memory)
    total = panels_inches + legend_inches + 0.45
    figure = Figure(figsize=(_WIDTH_INCHES, total), facecolor="white")
    top = total - legend_inches
    for panel, image, memory_inches in zip(panels, images, memory, strict=True):
        top -= _GAP_INCHES + panel.rows_inches
        axes = _axes(figure, top, panel.rows_inches, end_s)
        _draw_rows(axes, panel, image, end_s)
        if memory_inches:
            axes = _axes(figure, top - memory_inches, memory_inches - 0.1, end_s)
            _draw_memory(axes, panel)
        top -= memory_inches
    axes.tick_params(labelbottom=True)
    axes.set_xlabel("time" if is_abstract else "seconds", fontsize=9)
    _draw_legend(figure, legend, rows=legend_rows)
    write_figure(path, figure, dpi=_DPI)


def _axes(figure: Figure, bottom: float, height: float, end_s: float) -> Axes:
    """Return new axes of time at a position given in inches."""
    total = figure.get_figheight()
    left, width = _LEFT_INCHES / _WIDTH_INCHES, _PLOT_INCHES / _WIDTH_INCHES
    axes = figure.add_axes((left, bottom / total, width, height / total))
    axes.tick_params(labelbottom=False, labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, end_s)
    return axes


def _painted(panel: _Panel, end_s: float, legend: Legend) -> npt.NDArray[np.uint8]:
    """Return the picture of all rows, [pixels down, pixels of `end_s`, 3]; add to the legend."""
    timeline = panel.timeline
    ranks = len(timeline.ranks)
    lanes = list(panel.lanes)
    lines = np.full((ranks, len(lanes) + 1, _PIXELS, 3), 255, dtype=np.uint8)  # the last is white
    of_schedule = style.Style(timeline.schedule)
    for rank, track in enumerate(timeline.ranks):
        for idle in track.idle:
            look = style.IDLE[idle.cause]
            begin, end = (round(at * _PIXELS / end_s) for at in (idle.start_s, idle.finish_s))
            lines[rank, lanes.index("compute"), begin:end] = _rgb(look.colour)
            legend.setdefault(look.name, {})[look.colour] = None
        for span in timeline.spans(rank):
            if span.lane in panel.lanes and span.finish_s > span.start_s:
                look = of_schedule.look(span.action)
                begin = min(round(span.start_s * _PIXELS / end_s), _PIXELS - 1)
                end = max(round(span.finish_s * _PIXELS / end_s), begin + 1)
                line = lines[rank, lanes.index(span.lane)]
                line[begin:end] = _rgb(look.colour)
                if end - begin >= _EDGE_PIXELS:
                    line[end - 1] = 255
                legend.setdefault(look.name, {})[look.colour] = None
    if of_schedule.phases:
        legend[style.SHARD.name] = {style.SHARD.colour: None}
    down = max(1, round(panel.rows_inches * _DPI / ranks))
    middles = (np.arange(down) + 0.5) / down
    which = np.full(down, len(lanes))
    for index, (top, bottom) in enumerate(panel.lanes.values()):
        which[(middles >= top) & (middles < bottom)] = index
    return lines[:, which].reshape(ranks * down, _PIXELS, 3)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _draw_rows(axes: Axes, panel: _Panel, image: npt.NDArray[np.uint8], end_s: float) -> None:
    """Draw one row per rank, rank 0 on top, with the labels of units."""
    ranks = len(panel.timeline.ranks)
    axes.imshow(image, aspect="auto", extent=(0, end_s, ranks, 0), interpolation="nearest")
    axes.set_ylim(ranks, -0.04)
    named = range(0, ranks, max(1, -(-ranks // 16)))
    middle = sum(panel.lanes["compute"]) / 2
    axes.set_yticks([rank + middle for rank in named], labels=[f"rank {rank}" for rank in named])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    title = style.title(panel.timeline, is_abstract=panel.is_abstract)
    axes.set_title(title, fontsize=10, loc="left", pad=4)
    for number, (span, text, size, colour) in enumerate(_labels(panel, end_s)):
        if number == _MOST_LABELS:
            break
        axes.text(
            (span.start_s + span.finish_s) / 2,
            span.rank + middle,
            text,
            fontsize=size,
            ha="center",
            va="center",
            color="black" if colour in style.DARK_TEXT_ON else "white",
            linespacing=0.95,
            clip_on=True,
        )


def _labels(panel: _Panel, end_s: float) -> Iterator[tuple[Span, str, float, str]]:
    """Yield the labels of units that fit into their bars, with font size and colour of the bar.

    The label of a borrower's shard also names its stage. Equal bars get letters of equal size.
    """
    timeline, schedule = panel.timeline, panel.timeline.schedule
    of_schedule = style.Style(schedule)
    top, bottom = panel.lanes["compute"]
    bar_points = panel.rows_inches / len(timeline.ranks) * 72 * (bottom - top)
    spans = [
        (span, of_schedule.unit_label(span.action))
        for rank in range(len(timeline.ranks))
        for span in timeline.spans(rank)
        if span.lane == "compute"
    ]
    longest = max((len(text) for _, text in spans), default=0)
    for span, text in spans:
        action = span.action
        lines = [text]
        if action.num_shards > 1 and schedule.placement.rank_of(action.stage) != span.rank:
            lines.append(f"s{action.stage}")
        wide_points = (span.finish_s - span.start_s) / end_s * _PLOT_INCHES * 72
        characters = max(longest, *map(len, lines))
        size = min(9.0, wide_points / (characters * 0.68 + 0.5), bar_points / (1.25 * len(lines)))
        if size >= 4.5:
            yield span, "\n".join(lines), size, of_schedule.look(action).colour


def _draw_memory(axes: Axes, panel: _Panel) -> None:
    """Draw the memory over time of a few ranks, spread evenly from the first to the last."""
    from matplotlib import colormaps
    from matplotlib.ticker import MultipleLocator

    timeline = panel.timeline
    ranks = len(timeline.ranks)
    count = min(ranks, _MOST_MEMORY_LINES)
    chosen = sorted({round(k * (ranks - 1) / max(1, count - 1)) for k in range(count)})
    peak = max(track.memory["total"].peak_bytes for track in timeline.ranks if track.memory)
    for order, rank in enumerate(chosen):
        track = timeline.ranks[rank].memory["total"]
        axes.step(
            [0.0, *track.times_s, timeline.makespan_s],
            [0.0, *track.values_bytes, 0.0],
            where="post",
            linewidth=1.1,
            color=colormaps["plasma"](0.92 * order / max(1, len(chosen) - 1)),
            label=f"rank {rank}",
        )
    axes.set_ylim(0, peak * 1.35)  # the legend stands above every curve
    if panel.is_abstract:
        axes.set_ylabel("memory", fontsize=8)
    else:
        held = "memory of activations, K and V"
        axes.text(0.005, 0.93, held, transform=axes.transAxes, va="top", fontsize=8)
    if not panel.is_abstract and peak >= KIB:
        axes.yaxis.set_major_locator(MultipleLocator(binary_step(peak)))
        axes.yaxis.set_major_formatter(lambda value, _: format_bytes(round(value)))
    else:
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(
        fontsize=6.5, ncol=len(chosen), loc="upper right", handlelength=1.2, columnspacing=1.0,
        borderpad=0.1, borderaxespad=0.1, frameon=False,
    )  # fmt: skip


def binary_step(peak_bytes: float) -> int:
    """Return a power of two that gives one to three marks up to ``peak_bytes``."""
    return 1 << int(math.log2(peak_bytes) - 0.5)


def _draw_legend(figure: Figure, legend: Legend, *, rows: int) -> None:
    """Draw the legend above the first panel; shades of one meaning stand side by side."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    names = sorted(legend, key=style.LEGEND.index)
    handles: list[Any] = [  # the stubs do not know that a handle may be several patches
        tuple(Patch(facecolor=colour) for colour in legend[name]) for name in names
    ]
    figure.legend(
        handles, names, loc="upper left", ncol=-(-len(names) // rows), fontsize=9, frameon=False,
        bbox_to_anchor=(0.05, 0.999), columnspacing=1.3, handlelength=1.8,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip
