"""Export of timelines as a Chrome trace, which Perfetto (ui.perfetto.dev) opens.

One process per schedule and rank; one thread per lane (compute, copies, links, reductions), one
thread for idle time by cause, and one counter per memory bucket. Times are microseconds, as the
format requires; an abstract time of 1 is shown as one second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from sppo.output_file import whole_file
from sppo.plots import timeline_style as style
from sppo.schedule.timeline import Lane, Timeline

_MICROSECONDS = 1e6
_LANES: dict[Lane | str, int] = {
    "compute": 0,
    "d2h": 1,
    "h2d": 2,
    "link": 3,
    "reduce": 4,
    "idle": 5,
}
Event = dict[str, object]


def write_trace(path: Path, *, timelines: Sequence[Timeline]) -> None:
    """Write `timelines` into one trace file.

    Raises:
        OSError: A file that cannot be written.
    """
    with whole_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in _events(timelines):
            file.write((separator + json.dumps(event, separators=(",", ":"))).encode("utf-8"))
            separator = ",\n"
        file.write(b"\n]}\n")


def _events(timelines: Sequence[Timeline]) -> Iterator[Event]:
    ranks = [(timeline, rank) for timeline in timelines for rank in range(len(timeline.ranks))]
    for process, (timeline, rank) in enumerate(ranks):
        name = f"{timeline.schedule.name} rank {rank} ({timeline.provenance})"
        yield _named("process_name", process, 0, name)
        order = {"sort_index": process}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": order}
        yield from _rank_events(timeline, rank=rank, process=process)


def _rank_events(timeline: Timeline, *, rank: int, process: int) -> Iterator[Event]:
    used: set[Lane | str] = set()
    for span in timeline.spans(rank):
        used.add(span.lane)
        args = {"kind": style.kind(span.action).name, "stage": span.action.stage}
        event = _span(str(span.action), span.lane, process, span.start_s, span.finish_s)
        yield {**event, "args": args}
    for idle in timeline.ranks[rank].idle:
        used.add("idle")
        yield _span(style.IDLE[idle.cause].name, "idle", process, idle.start_s, idle.finish_s)
    for lane in sorted(used, key=lambda lane: _LANES[lane]):
        yield _named("thread_name", process, _LANES[lane], lane)
    yield from _memory_events(timeline, rank=rank, process=process)


def _span(name: str, lane: Lane | str, process: int, start_s: float, finish_s: float) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": lane,
        "pid": process,
        "tid": _LANES[lane],
        "ts": start_s * _MICROSECONDS,
        "dur": (finish_s - start_s) * _MICROSECONDS,
    }


def _memory_events(timeline: Timeline, *, rank: int, process: int) -> Iterator[Event]:
    """Yield the values of one counter per memory bucket that the rank uses."""
    for name, track in timeline.ranks[rank].memory.items():
        if name == "total" or track.peak_bytes == 0:
            continue
        for time, value in zip(track.times_s.tolist(), track.values_bytes.tolist(), strict=True):
            yield {
                "ph": "C",
                "name": f"memory: {name}",
                "pid": process,
                "tid": 0,
                "ts": time * _MICROSECONDS,
                "args": {"bytes": value},
            }


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
