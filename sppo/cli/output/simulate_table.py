"""Text output of ``sppo simulate``: one line per rank, and one per compared schedule."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from sppo.cli.arguments.simulate_request import SimulatedDevices
from sppo.cli.output.memory import host_memory_text
from sppo.report.lines import print_line
from sppo.schedule.timeline import Timeline
from sppo.units import counted, format_bytes, format_duration

_SHOWN_RANKS = 16


def print_tables(
    timelines: Sequence[Timeline],
    *,
    forward_makespan_s: float,
    devices: SimulatedDevices | None,
) -> None:
    """Print the step time, the idle time and its causes, and the memory of each rank.

    Args:
        timelines: Timeline of the requested schedule, then those of the schedules to compare with.
        forward_makespan_s: Makespan of the forward alone.
        devices: Devices that the costs are for; None with abstract costs.
    """
    is_abstract = devices is None
    console = Console(soft_wrap=True)
    first = timelines[0]
    schedule = first.schedule
    ranks = counted(schedule.num_ranks, "rank")
    if devices is not None and devices.num_devices > schedule.num_ranks:
        ranks = f"{counted(schedule.num_ranks, 'pipeline rank')} on {devices.num_devices} devices"
    print_line(
        f"{schedule.name}: {ranks}, {counted(schedule.num_stages, 'stage')}, "
        f"{counted(schedule.num_sequences, 'sequence')}, {counted(schedule.num_units, 'unit')} "
        f"({first.provenance})",
        console,
    )
    print_line(
        f"step {_time(first.makespan_s, is_abstract)} · forward alone "
        f"{_time(forward_makespan_s, is_abstract)} · idle "
        f"{first.bubble_fraction:.1%} of all rank-time ({first.bubble_ratio:.1%} of busy time)",
        console,
    )
    if devices is not None:
        print_line(f"costs of {devices.hardware}", console)
        if devices.chosen:
            print_line(f"chosen by solve: {', '.join(devices.chosen)}", console)
    console.print(_rank_table(first, devices=devices))
    if devices is not None and devices.host_peak_bytes and devices.node_host_bytes:
        text = host_memory_text(devices.host_peak_bytes, node_bytes=devices.node_host_bytes)
        print_line(text, console)
    hidden = schedule.num_ranks - _SHOWN_RANKS
    if hidden > 0:
        print_line(f"and {counted(hidden, 'more rank')}; --json lists all of them", console)
    if len(timelines) > 1:
        console.print(_comparison(timelines, is_abstract=is_abstract))


def device_total_bytes(timeline: Timeline, devices: SimulatedDevices) -> list[int]:
    """Return the peak memory of one device of each rank, states included; empty if not known."""
    return [
        steady + round(track.memory["total"].peak_bytes)
        for track, steady in zip(timeline.ranks, devices.steady_bytes, strict=False)
    ]


def _rank_table(timeline: Timeline, *, devices: SimulatedDevices | None) -> Table:
    is_abstract = devices is None
    totals = [] if devices is None else device_total_bytes(timeline, devices)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ("rank", "idle", "bubble", "waits for messages", "waits for copies", "in flight")
    memory = ("peak memory",) if is_abstract else ("saved + K/V", "one device")
    for heading in (*headings, *memory[: 1 + bool(totals)]):
        # Headings break between words, so that values stay on one line in 80 columns.
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for rank, track in enumerate(timeline.ranks[:_SHOWN_RANKS]):
        peak = track.memory["total"].peak_bytes if track.memory else 0.0
        table.add_row(
            str(rank),
            _time(track.idle_s(), is_abstract),
            _time(track.idle_s("bubble"), is_abstract),
            _time(track.idle_s("communication"), is_abstract),
            _time(track.idle_s("copy"), is_abstract),
            f"{round(track.peak_in_flight, 1):.4g}",
            f"{peak:.4g}" if is_abstract else format_bytes(peak),
            *map(format_bytes, totals[rank : rank + 1]),
        )
    return table


def _comparison(timelines: Sequence[Timeline], *, is_abstract: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("schedule")
    memory = "peak memory" if is_abstract else "saved + K/V"
    for heading in ("step", "against the first", "idle", memory):
        table.add_column(heading, justify="right")
    for timeline in timelines:
        peak = max(
            track.memory["total"].peak_bytes if track.memory else 0.0 for track in timeline.ranks
        )
        table.add_row(
            timeline.schedule.name,
            _time(timeline.makespan_s, is_abstract),
            f"{timeline.makespan_s / timelines[0].makespan_s:.2f}x"
            if timelines[0].makespan_s
            else "-",
            f"{timeline.bubble_fraction:.1%}",
            f"{peak:.4g}" if is_abstract else format_bytes(peak),
        )
    return table


def _time(seconds: float, is_abstract: bool) -> str:
    return f"{seconds:.6g}" if is_abstract else format_duration(seconds)
