"""Report of ``sppo simulate``: a row per rank, and one per compared schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from sppo.cli.arguments.simulate_request import SimulatedDevices
from sppo.cli.output.memory import host_memory_text
from sppo.cli.output.printing import say, table
from sppo.plots.timeline_report import timeline_report
from sppo.schedule.timeline import RankTrack, Timeline
from sppo.units import counted, format_bytes, format_duration

_SHOWN_RANKS = 16


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Report of simulated schedules.

    Attributes:
        timelines: Timeline of the requested schedule, then those of the schedules to compare with.
        forward_makespan_s: Makespan of the forward alone of the requested schedule.
        devices: Devices that the costs are for; None with abstract costs.
    """

    timelines: Sequence[Timeline]
    forward_makespan_s: float
    devices: SimulatedDevices | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the first timeline as JSON values, with the others as its comparison."""
        report = timeline_report(self.timelines[0])
        devices = self.devices
        if devices is not None:
            report["hardware"] = devices.hardware
            report["num_devices"] = devices.num_devices
            report["chosen_by_solve"] = list(devices.chosen)
            totals = self._device_total_bytes()
            report["device_total_bytes"] = totals or None
            if totals:
                # The same name has the same meaning as in solve and estimate: states are counted.
                report["saved_peak_bytes"] = report["device_peak_bytes"]
                report["device_peak_bytes"] = totals
            if devices.host_peak_bytes is not None:
                report["host_peak_bytes"] = devices.host_peak_bytes
                report["node_host_peak_bytes"] = devices.node_host_bytes
        report["forward_makespan_s"] = self.forward_makespan_s
        if len(self.timelines) > 1:
            report["compare"] = [timeline_report(timeline) for timeline in self.timelines[1:]]
        return report

    def show(self, console: Console) -> None:
        """Print the step time, the idle time and its causes, and the memory of each rank."""
        say(console, *self._lines())
        # Headings break between words, so that values stay on one line in 80 columns.
        headings = [heading.replace(" ", "\n") for heading in self._headings()]
        console.print(table(headings, self._rank_rows(), left=0))
        devices = self.devices
        if devices is not None and devices.host_peak_bytes and devices.node_host_bytes:
            host, node = devices.host_peak_bytes, devices.node_host_bytes
            say(console, host_memory_text(host, node_bytes=node))
        hidden = self.timelines[0].schedule.num_ranks - _SHOWN_RANKS
        if hidden > 0:
            say(console, f"and {counted(hidden, 'more rank')}; --json lists all of them")
        if len(self.timelines) > 1:
            headings = ["schedule", "step", "against the first", "idle", self._memory_heading()]
            console.print(table(headings, self._comparison_rows()))

    def _lines(self) -> Iterator[str]:
        first, devices = self.timelines[0], self.devices
        schedule = first.schedule
        ranks = counted(schedule.num_ranks, "rank")
        if devices is not None and devices.num_devices > schedule.num_ranks:
            ranks = counted(schedule.num_ranks, "pipeline rank")
            ranks += f" on {devices.num_devices} devices"
        yield (
            f"{schedule.name}: {ranks}, {counted(schedule.num_stages, 'stage')}, "
            f"{counted(schedule.num_sequences, 'sequence')}, {counted(schedule.num_units, 'unit')} "
            f"({first.provenance})"
        )
        yield (
            f"step {self._time(first.makespan_s)} · forward alone "
            f"{self._time(self.forward_makespan_s)} · idle {first.bubble_fraction:.1%} of all "
            f"rank-time ({first.bubble_ratio:.1%} of busy time)"
        )
        if devices is not None:
            yield f"costs of {devices.hardware}"
            if devices.chosen:
                yield f"chosen by solve: {', '.join(devices.chosen)}"

    def _headings(self) -> list[str]:
        waits = ["waits for messages", "waits for copies"]
        headings = ["rank", "idle", "bubble", *waits, "in flight", self._memory_heading()]
        return [*headings, "one device"] if self._device_total_bytes() else headings

    def _rank_rows(self) -> Iterator[list[str]]:
        totals = self._device_total_bytes()
        for rank, track in enumerate(self.timelines[0].ranks[:_SHOWN_RANKS]):
            yield [
                str(rank),
                self._time(track.idle_s()),
                self._time(track.idle_s("bubble")),
                self._time(track.idle_s("communication")),
                self._time(track.idle_s("copy")),
                f"{round(track.peak_in_flight, 1):.4g}",
                self._size(_peak_bytes(track)),
                *map(format_bytes, totals[rank : rank + 1]),
            ]

    def _comparison_rows(self) -> Iterator[list[str]]:
        first_s = self.timelines[0].makespan_s
        for timeline in self.timelines:
            yield [
                timeline.schedule.name,
                self._time(timeline.makespan_s),
                f"{timeline.makespan_s / first_s:.2f}x" if first_s else "-",
                f"{timeline.bubble_fraction:.1%}",
                self._size(max(map(_peak_bytes, timeline.ranks))),
            ]

    def _device_total_bytes(self) -> list[int]:
        """Return the peak memory of one device of each rank, states included; [] if not known."""
        if self.devices is None:
            return []
        tracks = zip(self.timelines[0].ranks, self.devices.steady_bytes, strict=False)
        return [steady + round(track.memory["total"].peak_bytes) for track, steady in tracks]

    def _memory_heading(self) -> str:
        return "peak memory" if self.devices is None else "saved + K/V"

    def _time(self, seconds: float) -> str:
        return f"{seconds:.6g}" if self.devices is None else format_duration(seconds)

    def _size(self, size_bytes: float) -> str:
        return f"{size_bytes:.4g}" if self.devices is None else format_bytes(size_bytes)


def _peak_bytes(track: RankTrack) -> float:
    return track.memory["total"].peak_bytes if track.memory else 0.0
