"""Export of timelines as one self-contained HTML page with zoom, drag and tooltips.

The page holds its data and its script (`html_page`) and needs no network.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from sppo.output_file import write_text
from sppo.schedule.timeline import RankTrack, Span, Timeline
from sppo.timeline import style
from sppo.timeline.html_page import PAGE

# A page with more bars opens too slowly; ranks are then sampled evenly.
_MOST_BARS = 400_000
_LANE_NUMBERS = {"compute": 0, "d2h": 1, "h2d": 2, "link": 3, "reduce": 4}
_MOST_MEMORY_POINTS = 4000
_LEGEND_ORDER = (
    *style.KIND_COLOURS.values(),
    *style.OTHER_COPY_COLOURS.values(),
    *style.SECOND_COLOURS.values(),
    *style.PHASE_COLOURS.values(),
)


def write_html(path: Path, *, timelines: Sequence[Timeline], is_abstract: bool = False) -> None:
    """Write `timelines` into one page, one below the other on one time axis.

    Args:
        path: File to write.
        timelines: At least one timeline.
        is_abstract: Whether times are multiples of one forward and memory is in multiples of one
            unit's, instead of seconds and bytes.

    Raises:
        OSError: A file that cannot be written.
    """
    bars = sum(len(track.actions) for timeline in timelines for track in timeline.ranks)
    every = max(1, -(-bars // _MOST_BARS))
    data = {
        "abstract": is_abstract,
        "panels": [
            _panel(timeline, every=every, is_abstract=is_abstract) for timeline in timelines
        ],
        "idle": [
            {"name": style.IDLE_NAMES[cause], "colour": colour}
            for cause, colour in style.IDLE_COLOURS.items()
        ],
    }
    # Escaped, because a schedule's name from a program file may contain "</script>".
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    names = " · ".join(f"{line.schedule.name}, {line.provenance}" for line in timelines)
    filled = {"TITLE": html.escape(names), "DATA": text}
    page = re.sub(r"\{\{(TITLE|DATA)\}\}", lambda match: filled[match[1]], PAGE)
    write_text(path, page)


def _panel(timeline: Timeline, *, every: int, is_abstract: bool) -> dict[str, object]:
    """Return the data of one schedule's panel, with every `every`-th rank."""
    phases = style.phases(timeline.schedule)
    styles: dict[tuple[str, str], int] = {}
    rows = [
        {
            "rank": rank,
            "bars": [
                _bar(span, timeline=timeline, phases=phases, styles=styles)
                for span in timeline.spans(rank)
                if span.finish_s > span.start_s
            ],
            "idle": [
                [idle.start_s, idle.finish_s, list(style.IDLE_COLOURS).index(idle.cause)]
                for idle in timeline.ranks[rank].idle
            ],
            "memory": _memory(timeline.ranks[rank]),
        }
        for rank in range(0, len(timeline.ranks), every)
    ]
    shown = "" if every == 1 else f" · 1 of {every} ranks shown"
    return {
        "title": style.title(timeline, is_abstract=is_abstract) + shown,
        "makespan": timeline.makespan_s,
        "rows": rows,
        "styles": [
            {"colour": colour, "name": name, "order": _LEGEND_ORDER.index(colour)}
            for colour, name in styles
        ],
    }


def _bar(
    span: Span,
    *,
    timeline: Timeline,
    phases: dict[tuple[int, int | None, int | None], style.Phase],
    styles: dict[tuple[str, str], int],
) -> list[object]:
    """Return [start, end, lane, style, label, program text of the action]."""
    action, schedule = span.action, timeline.schedule
    colour = style.colour_of(action, schedule=schedule, phases=phases)
    name = style.name_of(action)
    phase = phases.get((action.stage, action.sequence, action.subsequence))
    if action.num_shards > 1 and phase and (action.kind, phase) in style.PHASE_COLOURS:
        name = f"{name}, {style.PHASE_NAMES[phase]}"
    elif colour in style.SECOND_COLOURS.values():
        name = f"{name}, {style.shades(schedule)}"
    number = styles.setdefault((colour, name), len(styles))
    label = style.unit_label(action, schedule=schedule) if span.lane == "compute" else ""
    return [
        span.start_s, span.finish_s, _LANE_NUMBERS[span.lane], number, label, str(action),
    ]  # fmt: skip


def _memory(track: RankTrack) -> list[list[float]]:
    """Return [time, value] of the total, thinned to as many points as a screen can show."""
    if not track.memory:
        return []
    total = track.memory["total"]
    every = max(1, -(-total.times_s.size // _MOST_MEMORY_POINTS))
    times, values = total.times_s[::every].tolist(), total.values_bytes[::every].tolist()
    return [[time, value] for time, value in zip(times, values, strict=True)]
