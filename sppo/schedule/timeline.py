"""Timeline: start and end of every action, in a simulation or in a measured run.

Times are seconds from the start of the step on one clock. A planned and a measured timeline of the
same schedule can be compared, rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from sppo.schedule.actions import COMPUTE_KINDS, Action, ActionKind
from sppo.schedule.costs import Costs, Table
from sppo.schedule.graph import Floats
from sppo.schedule.memory_track import MemoryTrack, memory_tracks
from sppo.schedule.schedule import Schedule

Lane = Literal["compute", "d2h", "h2d", "link", "reduce"]
IdleCause = Literal["bubble", "communication", "copy"]
Provenance = Literal["simulated", "measured"]

CAUSES: tuple[IdleCause, ...] = ("bubble", "communication", "copy")
"""Causes of a rank's waits: no work is left or an input is not computed; it is not sent, or
gradients are being reduced; it has arrived, but what the step offloaded is not back."""
BUBBLE, COMMUNICATION, COPY = range(3)
"""Places of the causes in `CAUSES`."""
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
    """Interval in which a rank's compute waited, and the cause."""

    start_s: float
    finish_s: float
    cause: IdleCause


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


@dataclass(frozen=True, eq=False)
class Timeline:
    """Schedule of a step with the times of its actions.

    Attributes:
        schedule: Schedule that was run.
        provenance: "simulated" or "measured".
        starts_s: Start of each action of the schedule; 0 for the action that never happens.
        finishes_s: End of each action; of a SEND, the arrival of its message.
        waits: Waits of the ranks for their compute, between it, and behind it to the step's end,
            rank after rank in order: rank, begin, end and cause of each, [4, waits].
        costs: Costs of the actions, which give the memory; None if it is not known.
    """

    schedule: Schedule
    provenance: Provenance
    starts_s: Floats
    finishes_s: Floats
    waits: Floats
    costs: Costs | None = None

    @property
    def makespan_s(self) -> float:
        """Seconds from 0 to the end of the last action of any rank."""
        return float(self.finishes_s.max(initial=0.0))

    @cached_property
    def idle_s(self) -> Table:
        """Seconds that each rank's compute waits, by cause, [ranks, causes]."""
        found = np.zeros((self.schedule.num_ranks, len(CAUSES)))
        ranks, begins_s, ends_s, causes = self.waits
        np.add.at(found, (ranks.astype(int), causes.astype(int)), ends_s - begins_s)
        return found

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of the step: idle time of all ranks over num_ranks * makespan.

        All idle time counts, whatever its cause. Research on schedules calls this number "share";
        the papers' *bubble ratio* (p - 1) / N is idle over busy time instead.
        """
        total = len(self.idle_s) * self.makespan_s
        return float(self.idle_s.sum()) / total if total else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle time over busy time of all ranks: (p - 1) / N for N equal units on p stages."""
        idle = float(self.idle_s.sum())
        busy = len(self.idle_s) * self.makespan_s - idle
        return idle / busy if busy else 0.0

    @cached_property
    def ranks(self) -> tuple[RankTrack, ...]:
        """Actions, times and memory of each rank."""
        schedule, split = self.schedule, self.schedule.split_by_rank
        memory: Sequence[Mapping[str, MemoryTrack]] = [{}] * schedule.num_ranks
        if self.costs is not None:
            memory = memory_tracks(
                schedule, starts_s=self.starts_s, finishes_s=self.finishes_s, costs=self.costs
            )
        idle: list[list[Idle]] = [[] for _ in range(schedule.num_ranks)]
        for rank, begin, end, cause in self.waits.T.tolist():
            idle[int(rank)].append(Idle(begin, end, CAUSES[int(cause)]))
        columns = zip(
            schedule.programs,
            split(self.starts_s[:-1]),
            split(self.finishes_s[:-1]),
            map(tuple, idle),
            memory,
            schedule.peak_in_flight,
            strict=True,
        )
        return tuple(RankTrack(*own) for own in columns)

    def spans(self, rank: int) -> Iterator[Span]:
        """Yield the spans of one rank in program order, without RECV, which takes no time."""
        track = self.ranks[rank]
        for action, start, finish in zip(
            track.actions, track.start_s.tolist(), track.finish_s.tolist(), strict=True
        ):
            if action.kind is not ActionKind.RECV:
                yield Span(rank, _LANES[action.kind], action, start, finish)


def measured_timeline(
    schedule: Schedule, *, times_s: Sequence[Sequence[tuple[float, float]]]
) -> Timeline:
    """Return a timeline of measured times, in which every gap between compute is a bubble.

    Args:
        schedule: Schedule that was run.
        times_s: (start, end) of every action of every rank, in program order, on one clock that
            is 0 when the step began.
    """
    flat = [*(times for own in times_s for times in own), (0.0, 0.0)]
    starts_s, finishes_s = np.array(flat).T
    gaps = []
    for rank in range(schedule.num_ranks):
        own = schedule.compute[schedule.ranks[schedule.compute] == rank]
        free = np.maximum.accumulate(np.append(0.0, finishes_s[own]))
        until = np.append(starts_s[own], finishes_s.max())
        waits = until > free
        gaps.append(np.stack(np.broadcast_arrays(rank, free[waits], until[waits], BUBBLE)))
    return Timeline(schedule, "measured", starts_s, finishes_s, np.hstack(gaps))
