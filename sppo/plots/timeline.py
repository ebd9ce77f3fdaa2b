"""Plot of timelines: one panel per schedule, one row per rank, memory below.

Steps of up to 20,000 bars are drawn bar by bar with labels; larger steps are painted pixel by
pixel, because their bars are too small to tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sppo.output_file import write_figure
from sppo.plots.frame import hide_spines
from sppo.schedule.actions import COMPUTE_KINDS, Action, ActionKind
from sppo.schedule.timeline import IdleCause, Span, Timeline
from sppo.timeline import style
from sppo.units import MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BARS = 20_000
_MOST_LABELS = 4_000
_WIDTH_INCHES = 15.0
_LEFT_INCHES, _RIGHT_INCHES = 0.85, 0.25
_PIXELS = 2400
_MOST_MEMORY_LINES = 8
_LEGEND_CHARACTERS = 200
_NARROW_INCHES = 0.06
_SHARD_MARK = "s1"
"""Second line of the label of a shard of stage 1."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """Content and size of one schedule's panel."""

    timeline: Timeline
    is_abstract: bool
    is_painted: bool
    has_copies: bool
    has_memory: bool
    rows_inches: float

    @property
    def bar_bottom(self) -> float:
        """End of the compute bar in a row of height 1; copies are drawn below."""
        return 0.62 if self.has_copies else 0.9

    @property
    def label_characters(self) -> int:
        """Length of the longest label, so that equal bars get letters of equal size."""
        schedule = self.timeline.schedule
        sequence = schedule.num_sequences - 1
        last = max(map(len, schedule.lengths)) - 1
        longest = Action(ActionKind.F, 0, sequence, last)
        return len(style.unit_label(longest, schedule=schedule))


def write_png(
    path: Path, *, timelines: Sequence[Timeline], is_abstract: bool = False, dpi: int = 150
) -> None:
    """Draw `timelines` one below the other on one time axis.

    Args:
        path: File to write.
        timelines: At least one timeline.
        is_abstract: Whether times are multiples of one forward and memory is in multiples of one
            unit's, instead of seconds and bytes.
        dpi: Pixels per inch; the plot is 15 inches wide.

    Raises:
        OSError: A file that cannot be written.
    """
    from matplotlib.figure import Figure

    panels = [_panel(timeline, is_abstract=is_abstract) for timeline in timelines]
    heights: list[float] = []
    for panel in panels:
        heights += [panel.rows_inches, 0.75 if panel.has_memory else 0.01]
    entries = _legend_entries(panels)
    legend_rows = -(-sum(len(name) + 6 for name, _ in entries) // _LEGEND_CHARACTERS)
    legend_inches, gap = 0.05 + 0.2 * legend_rows, 0.42
    total = sum(heights) + legend_inches + gap * len(panels) + 0.45
    figure = Figure(figsize=(_WIDTH_INCHES, total), facecolor="white")
    end = max(timeline.makespan_s for timeline in timelines) or 1.0
    top = total - legend_inches
    for number, panel in enumerate(panels):
        top -= gap
        axes = _axes(figure, top - panel.rows_inches, panel.rows_inches, total)
        _draw_rows(axes, panel=panel, end_s=end)
        top -= panel.rows_inches
        if panel.has_memory:
            below = _axes(figure, top - 0.75, 0.65, total)
            _draw_memory(below, panel=panel, end_s=end)
            top -= 0.75
        else:
            below = axes
        if number == len(panels) - 1:
            below.tick_params(labelbottom=True)
            below.set_xlabel("time" if is_abstract else "seconds", fontsize=9)
    _draw_legend(figure, entries=entries, rows=legend_rows)
    write_figure(path, figure, dpi=dpi)


def _panel(timeline: Timeline, *, is_abstract: bool) -> _Panel:
    bars = sum(len(track.actions) for track in timeline.ranks)
    has_copies = any(
        action.kind in (ActionKind.D2H, ActionKind.H2D)
        for track in timeline.ranks
        for action in track.actions
    )
    ranks = len(timeline.ranks)
    is_painted = bars > _MOST_BARS
    row = 0.48 if has_copies else 0.36
    rows_inches = min(max(ranks * row, 0.5), 7.0)
    is_painted = is_painted or rows_inches / ranks < 0.1
    has_memory = any(
        track.memory and track.memory["total"].peak_bytes > 0 for track in timeline.ranks
    )
    copies = has_copies and not is_painted
    return _Panel(timeline, is_abstract, is_painted, copies, has_memory, rows_inches)


def _axes(figure: Figure, bottom: float, height: float, total: float) -> Axes:
    """Return new axes at a position given in inches."""
    width = _WIDTH_INCHES - _LEFT_INCHES - _RIGHT_INCHES
    axes = figure.add_axes(
        (_LEFT_INCHES / _WIDTH_INCHES, bottom / total, width / _WIDTH_INCHES, height / total)
    )
    axes.tick_params(labelbottom=False, labelsize=8, length=2)
    hide_spines(axes, "top", "right")
    return axes


def _draw_rows(axes: Axes, *, panel: _Panel, end_s: float) -> None:
    """Draw one row per rank, rank 0 on top."""
    timeline = panel.timeline
    ranks = len(timeline.ranks)
    axes.set_xlim(0, end_s)
    axes.set_ylim(ranks, -0.04)
    step = max(1, -(-ranks // 16))
    axes.set_yticks(
        [rank + 0.02 + panel.bar_bottom / 2 for rank in range(0, ranks, step)],
        labels=[f"rank {rank}" for rank in range(0, ranks, step)],
    )
    axes.tick_params(axis="y", length=0)
    hide_spines(axes, "left")
    axes.set_title(
        style.title(timeline, is_abstract=panel.is_abstract), fontsize=10, loc="left", pad=4
    )
    if panel.is_painted:
        _paint(axes, timeline=timeline)
        return
    _draw_idle(axes, panel=panel)
    _draw_bars(axes, panel=panel, end_s=end_s)


def _draw_idle(axes: Axes, *, panel: _Panel) -> None:
    for cause, colour in style.IDLE_COLOURS.items():
        for rank, track in enumerate(panel.timeline.ranks):
            gaps = [(i.start_s, i.finish_s - i.start_s) for i in track.idle if i.cause == cause]
            height = panel.bar_bottom - 0.04
            axes.broken_barh(gaps, (rank + 0.04, height), facecolors=colour, linewidth=0)


def _draw_bars(axes: Axes, *, panel: _Panel, end_s: float) -> None:
    timeline = panel.timeline
    phases = style.phases(timeline.schedule)
    inches_per_s = (_WIDTH_INCHES - _LEFT_INCHES - _RIGHT_INCHES) / end_s
    labels = 0
    for rank in range(len(timeline.ranks)):
        by_colour: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
        for span in timeline.spans(rank):
            place = _place(span, panel=panel)
            if place is None or span.finish_s <= span.start_s:
                continue
            colour = style.colour_of(span.action, schedule=timeline.schedule, phases=phases)
            extent = (span.start_s, span.finish_s - span.start_s)
            by_colour.setdefault((colour, *place), []).append(extent)
            if labels < _MOST_LABELS:
                labels += _label(
                    axes, span, panel=panel, place=place, inches=extent[1] * inches_per_s, on=colour
                )
        for (colour, top, height), extents in by_colour.items():
            # White edges separate neighbours; they would cover a narrow bar completely.
            narrow = [e for e in extents if e[1] * inches_per_s < _NARROW_INCHES]
            wide = [e for e in extents if e[1] * inches_per_s >= _NARROW_INCHES]
            for some, edge in ((wide, "white"), (narrow, colour)):
                axes.broken_barh(
                    some, (rank + top, height), facecolors=colour, edgecolor=edge, linewidth=0.6
                )


def _place(span: Span, *, panel: _Panel) -> tuple[float, float] | None:
    """Return top and height of a span within its row; None for lanes that are not drawn."""
    if span.lane == "compute":
        return 0.04, panel.bar_bottom - 0.04
    if span.lane == "d2h":
        return panel.bar_bottom + 0.03, 0.13
    if span.lane == "h2d":
        return panel.bar_bottom + 0.18, 0.13
    return None


def _label(
    axes: Axes, span: Span, *, panel: _Panel, place: tuple[float, float], inches: float, on: str
) -> int:
    """Write the unit into its bar if it fits, and return the number of labels written.

    A borrower's shard also names its stage.
    """
    if span.lane != "compute":
        return 0
    schedule = panel.timeline.schedule
    text = style.unit_label(span.action, schedule=schedule)
    helped = ""
    if span.action.num_shards > 1 and schedule.placement.rank_of(span.action.stage) != span.rank:
        helped = f"s{span.action.stage}"
    longest = max(panel.label_characters, len(helped))
    row_points = panel.rows_inches / len(panel.timeline.ranks) * 72
    lines = 2 if helped else 1
    size = min(9.0, inches * 72 / (longest * 0.68 + 0.5), row_points * place[1] / (1.25 * lines))
    if size < 4.5:
        return 0
    axes.text(
        (span.start_s + span.finish_s) / 2,
        span.rank + place[0] + place[1] / 2,
        f"{text}\n{helped}" if helped else text,
        fontsize=size,
        ha="center",
        va="center",
        color="black" if on in style.DARK_TEXT_ON else "white",
        linespacing=0.95,
        clip_on=True,
    )
    return 1


def _paint(axes: Axes, *, timeline: Timeline) -> None:
    """Draw every row as one line of pixels: the action of the rank at the middle of each pixel."""
    image = np.full((len(timeline.ranks), _PIXELS, 3), 255, dtype=np.uint8)
    at = (np.arange(_PIXELS) + 0.5) / _PIXELS * timeline.makespan_s
    schedule = timeline.schedule
    phases = style.phases(schedule)
    for rank, track in enumerate(timeline.ranks):
        for idle in track.idle:
            inside = (at >= idle.start_s) & (at < idle.finish_s)
            image[rank, inside] = _rgb(style.IDLE_COLOURS[idle.cause])
        compute = [n for n, action in enumerate(track.actions) if action.kind in COMPUTE_KINDS]
        if not compute:
            continue
        start, finish = track.start_s[compute], track.finish_s[compute]
        colours = np.array(
            [
                _rgb(style.colour_of(track.actions[n], schedule=schedule, phases=phases))
                for n in compute
            ],
            dtype=np.uint8,
        )
        which = np.searchsorted(start, at, side="right") - 1
        busy = (which >= 0) & (at < finish[which])
        image[rank, busy] = colours[which[busy]]
    ranks = len(timeline.ranks)
    extent = (0, timeline.makespan_s, ranks, 0)
    axes.imshow(image, aspect="auto", extent=extent, interpolation="nearest")


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _draw_memory(axes: Axes, *, panel: _Panel, end_s: float) -> None:
    """Draw the memory over time of a few ranks, spread evenly from the first to the last."""
    from matplotlib import colormaps
    from matplotlib.ticker import MultipleLocator

    timeline = panel.timeline
    ranks = len(timeline.ranks)
    count = min(ranks, _MOST_MEMORY_LINES)
    chosen = sorted({round(k * (ranks - 1) / max(1, count - 1)) for k in range(count)})
    colours = colormaps["plasma"]
    peak = max(track.memory["total"].peak_bytes for track in timeline.ranks if track.memory)
    for order, rank in enumerate(chosen):
        track = timeline.ranks[rank].memory["total"]
        axes.step(
            [0.0, *track.times_s, timeline.makespan_s],
            [0.0, *track.values_bytes, 0.0],
            where="post",
            linewidth=1.1,
            color=colours(0.92 * order / max(1, len(chosen) - 1)),
            label=f"rank {rank}",
        )
    axes.set_xlim(0, end_s)
    axes.set_ylim(0, peak * 1.35)  # the legend stands above every curve
    if panel.is_abstract:
        axes.set_ylabel("memory", fontsize=8)
    else:
        held = "memory of activations, K and V"
        axes.text(0.005, 0.93, held, transform=axes.transAxes, va="top", fontsize=8)
    if not panel.is_abstract and peak >= MIB:
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


def _legend_entries(panels: Sequence[_Panel]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names and colours of everything drawn in the plot, and of nothing else.

    Without a colour: the mark of a shard, :data:`_SHARD_MARK`.
    """
    seen = _Seen.of(panels)
    forward, backward = ActionKind.F, ActionKind.B
    entries: list[tuple[str, tuple[str, ...]]] = [
        (name, (style.KIND_COLOURS[kind],))
        for kind, name in style.KIND_NAMES.items()
        if kind in seen.kinds
    ]
    entries += [
        (name, (style.OTHER_COPY_COLOURS[copy],))
        for copy, name in style.OTHER_COPY_NAMES.items()
        if copy in seen.other_copies
    ]
    second = style.SECOND_COLOURS[forward], style.SECOND_COLOURS[backward]
    entries += [(name, second) for name in seen.shades]
    entries += [
        (name, (style.PHASE_COLOURS[forward, phase], style.PHASE_COLOURS[backward, phase]))
        for phase, name in style.PHASE_NAMES.items()
        if phase in seen.phases
    ]
    if seen.phases:
        entries.append(("shard of stage 1 (MSP), on another rank", ()))
    entries += [
        (name, (style.IDLE_COLOURS[cause],))
        for cause, name in style.IDLE_NAMES.items()
        if cause in seen.causes
    ]
    return entries


def _draw_legend(
    figure: Figure, *, entries: Sequence[tuple[str, tuple[str, ...]]], rows: int
) -> None:
    """Draw the legend above the first panel; two shades stand for forward and backward."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    mark = Line2D([], [], marker=f"${_SHARD_MARK}$", linestyle="", color="black", markersize=10)
    handles: list[Any] = [  # the stubs do not know that a handle may be several patches
        tuple(Patch(facecolor=colour) for colour in colours) or mark for _, colours in entries
    ]
    figure.legend(
        handles, [name for name, _ in entries], loc="upper left", ncol=-(-len(entries) // rows),
        fontsize=9, frameon=False, bbox_to_anchor=(0.05, 0.999), columnspacing=1.3,
        handlelength=1.8, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Seen:
    """Kinds of marks in a plot that its legend must explain."""

    kinds: frozenset[ActionKind]
    other_copies: frozenset[style.Copy]
    causes: frozenset[IdleCause]
    phases: frozenset[style.Phase]
    shades: tuple[str, ...]

    @classmethod
    def of(cls, panels: Sequence[_Panel]) -> _Seen:
        """Return the marks that are drawn in any of `panels`."""
        timelines = [panel.timeline for panel in panels]
        tracks = [track for timeline in timelines for track in timeline.ranks]
        drawn = set(COMPUTE_KINDS)
        if any(panel.has_copies for panel in panels):
            drawn |= {ActionKind.D2H, ActionKind.H2D}
        actions = [a for track in tracks for a in track.actions if a.kind in drawn]
        return cls(
            frozenset(a.kind for a in actions if style.other_copy(a) is None),
            frozenset(filter(None, map(style.other_copy, actions))),
            frozenset(idle.cause for track in tracks for idle in track.idle),
            frozenset(p for t in timelines for p in style.phases(t.schedule).values()),
            tuple(dict.fromkeys(filter(None, (style.shades(t.schedule) for t in timelines)))),
        )
