"""Timeline: start and end of every action, in a simulation or in a measured run.

Times are seconds from the start of the step on one clock. All data is per rank, so that a planned
and a measured timeline of the same schedule can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sppo.schedule.actions import COMPUTE_KINDS, Action, ActionKind
from sppo.schedule.schedule import Schedule

Lane = Literal["compute", "d2h", "h2d", "link", "reduce"]
IdleCause = Literal["bubble", "communication", "copy"]
Provenance = Literal["simulated", "measured"]
Floats = npt.NDArray[np.float64]

_LANES: dict[ActionKind, Lane] = {
    **dict.fromkeys(COMPUTE_KINDS, "compute"),
    ActionKind.D2H: "d2h",
    ActionKind.H2D: "h2d",
    ActionKind.SEND: "link",
    ActionKind.REDUCE: "reduce",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank with its times."""

    rank: int
    lane: Lane
    action: Action
    start_s: float
    finish_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Interval in which a rank's compute waited, and the cause.

    "bubble": the input was not computed yet, or no work was left; "communication": the input was
    computed and in flight, or gradients were being reduced; "copy": the input had arrived, but the
    activations were not back from the host (exposed copy time).
    """

    start_s: float
    finish_s: float
    cause: IdleCause


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTrack:
    """Bytes of one bucket on one rank: `values_bytes[i]` from `times_s[i]` to `times_s[i + 1]`."""

    times_s: Floats
    values_bytes: Floats

    @property
    def peak_bytes(self) -> float:
        """Peak of the bucket over the step."""
        return float(self.values_bytes.max(initial=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class RankTrack:
    """Actions of one rank with their times, idle times and memory.

    Attributes:
        actions: Program of the rank.
        start_s: Start of each action.
        finish_s: End of each action; for SEND, the arrival at the receiver.
        idle: Waits of the rank's compute from time 0 to the end of the step, in order.
        memory: Device memory by bucket; "total" is their sum.
        peak_in_flight: Most units at once between F and the last B or W; a shard counts its share.
    """

    actions: tuple[Action, ...]
    start_s: Floats
    finish_s: Floats
    idle: tuple[Idle, ...]
    memory: Mapping[str, MemoryTrack]
    peak_in_flight: float

    def idle_s(self, cause: IdleCause | None = None) -> float:
        """Return the idle seconds, for one cause or for all."""
        return sum(i.finish_s - i.start_s for i in self.idle if cause in (None, i.cause))


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Schedule of a step with the times of its actions.

    Attributes:
        schedule: Schedule that was run.
        provenance: "simulated" or "measured".
        makespan_s: Seconds from 0 to the end of the last action of any rank.
        ranks: Actions, times and memory of each rank.
    """

    schedule: Schedule
    provenance: Provenance
    makespan_s: float
    ranks: tuple[RankTrack, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of the step: idle time of all ranks over num_ranks * makespan.

        All idle time counts, whatever its cause. Research on schedules calls this number "share";
        the papers' *bubble ratio* (p - 1) / N is idle over busy time instead.
        """
        total = len(self.ranks) * self.makespan_s
        return sum(track.idle_s() for track in self.ranks) / total if total else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle time over busy time of all ranks: (p - 1) / N for N equal units on p stages."""
        idle = sum(track.idle_s() for track in self.ranks)
        busy = len(self.ranks) * self.makespan_s - idle
        return idle / busy if busy else 0.0

    def spans(self, rank: int) -> Iterator[Span]:
        """Yield the spans of one rank in program order, without RECV, which takes no time."""
        track = self.ranks[rank]
        for action, start, finish in zip(
            track.actions, track.start_s.tolist(), track.finish_s.tolist(), strict=True
        ):
            if action.kind is not ActionKind.RECV:
                yield Span(rank, _LANES[action.kind], action, start, finish)


def measured_timeline(
    schedule: Schedule,
    *,
    times_s: Sequence[Sequence[tuple[float, float]]],
    waits: Sequence[Sequence[Idle]] | None = None,
) -> Timeline:
    """Return a timeline of measured times.

    Args:
        schedule: Schedule that was run.
        times_s: (start, end) of every action of every rank, in program order, on one clock that
            is 0 when the step began.
        waits: Waits with a known cause per rank; if not given, every gap is a bubble.
    """
    makespan = max((end for times in times_s for _, end in times), default=0.0)
    tracks = []
    for rank, (program, times) in enumerate(zip(schedule.programs, times_s, strict=True)):
        start = np.array([t[0] for t in times])
        finish = np.array([t[1] for t in times])
        idle = tuple(waits[rank]) if waits else _gaps(program, start, finish, makespan_s=makespan)
        tracks.append(RankTrack(program, start, finish, idle, {}, schedule.peak_in_flight[rank]))
    return Timeline(schedule, "measured", makespan, tuple(tracks))


def _gaps(
    program: Sequence[Action], start_s: Floats, finish_s: Floats, *, makespan_s: float
) -> tuple[Idle, ...]:
    """Return the intervals in which no compute action of a rank runs."""
    gaps, free = [], 0.0
    for action, start, finish in zip(program, start_s.tolist(), finish_s.tolist(), strict=True):
        if action.kind in COMPUTE_KINDS:
            if start > free:
                gaps.append(Idle(free, start, "bubble"))
            free = max(free, finish)
    if makespan_s > free:
        gaps.append(Idle(free, makespan_s, "bubble"))
    return tuple(gaps)
