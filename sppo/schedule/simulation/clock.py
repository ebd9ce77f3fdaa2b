"""Times of all actions of a step, and the waits of each rank's compute with their causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sppo.schedule.costs import Costs, Table
from sppo.schedule.encoding import D2H, D2H_KV, NUM_COMPUTE
from sppo.schedule.graph import Edges, Floats, Ints, Standstill, longest_paths
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.dependencies import BUBBLE, COMMUNICATION, COPY, Dependencies

_SHOWN = 4


class DeadlockError(RuntimeError):
    """Error of a schedule whose ranks wait for each other: the order of the programs has a cycle.

    No request causes it, but a bug of what made the programs.

    Attributes:
        rank: First rank that cannot proceed.
        index: Position in the program of that rank at which it waits, from 0.
    """

    def __init__(self, problem: str, rank: int, index: int) -> None:
        super().__init__(problem)
        self.rank = rank
        self.index = index


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Times in which compute of a rank waits, rank after rank in order, one entry each.

    Attributes:
        ranks: Rank that waits.
        begins_s: Start of the wait.
        ends_s: End of the wait.
        causes: BUBBLE, COMMUNICATION or COPY.
    """

    ranks: Ints
    begins_s: Floats
    ends_s: Floats
    causes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """Times of all actions of a step.

    Attributes:
        starts_s: Start of each action, by rank and position in its program.
        finishes_s: End of each action; of a SEND, the arrival of its message.
        gaps: Waits of each rank for its compute and between it.
        busy_until_s: End of the last compute of each rank, [ranks].
    """

    starts_s: Sequence[Floats]
    finishes_s: Sequence[Floats]
    gaps: Gaps
    busy_until_s: Floats

    @property
    def end_s(self) -> float:
        """End of the last action."""
        return max(float(times.max(initial=0.0)) for times in self.finishes_s)

    @property
    def idle_s(self) -> Table:
        """Seconds that compute of each rank waits, to the end of the step, [ranks, causes]."""
        idle, gaps = np.zeros((self.busy_until_s.size, 3)), self.gaps
        np.add.at(idle, (gaps.ranks, gaps.causes), gaps.ends_s - gaps.begins_s)
        idle[:, BUBBLE] += self.end_s - self.busy_until_s
        return idle


def run_clock(schedule: Schedule, *, costs: Costs, seconds: Floats | None = None) -> Clock:
    """Simulate a step once.

    Args:
        schedule: Schedule of the step.
        costs: Costs of the actions.
        seconds: Seconds of each action, rank after rank, which replace those of `costs`; NaN
            replaces nothing. An MSP group takes those of its longest shard.

    Raises:
        DeadlockError: Actions wait for each other in a cycle; the message names the actions.
    """
    step = Dependencies(schedule, costs=costs, seconds=seconds)
    edges = step.edges
    try:
        ends = longest_paths(edges, seconds=step.seconds, ranks=step.ranks, turns=step.turns)
    except Standstill as standstill:
        raise _deadlock(standstill, step) from None
    edges = Edges.joined([edges, *step.implied])
    ready = np.maximum.accumulate(
        [
            edges.where(edges.cause == cause).starts_s(ends)
            for cause in (BUBBLE, COMMUNICATION, COPY)
        ]
    )
    # Copies out may wait on the way for blocks that are not made yet.
    starts, out = ready[COPY].copy(), step.actions.of(D2H, D2H_KV)
    starts[out] = ready[COMMUNICATION][out]
    finishes = np.maximum(ends, step.last_blocks.starts_s(ends))
    finishes[: step.latency_s.size] += step.latency_s
    parts = np.cumsum([program.codes.size for program in schedule.encoded])
    busy_until = np.zeros(schedule.num_ranks)
    np.maximum.at(busy_until, step.actions.ranks[step.actions.compute], ends[step.actions.compute])
    return Clock(
        np.split(starts, parts)[:-1],
        np.split(finishes, parts)[:-1],
        _gaps(step, ends, ready, busy_until),
        busy_until,
    )


def _gaps(step: Dependencies, ends: Floats, ready: Floats, busy_until: Floats) -> Gaps:
    """Return the waits of compute.

    Args:
        step: Services of the step.
        ends: End of each service.
        ready: When each service could start as far as one, two, or all causes tell, [3, services].
        busy_until: End of the last compute of each rank.
    """
    actions, services, waiting = step.compute
    ranks = step.actions.ranks[actions]
    free = np.append(0.0, ends[services][:-1])
    free[np.diff(ranks, prepend=-1) > 0] = 0.0
    moments = np.maximum.accumulate([free, *(times[waiting] for times in ready)])
    occupied = np.where(step.actions.codes[actions] < NUM_COMPUTE, moments[-1], ends[services])
    begins, stops = moments.T.ravel(), np.vstack([moments[1:], occupied]).T.ravel()
    ranks = np.repeat(ranks, len(moments))
    causes = np.tile([BUBBLE, COMMUNICATION, COPY, COMMUNICATION], services.size)
    waits = (stops > begins) & (begins < busy_until[ranks])
    return Gaps(ranks[waits], begins[waits], stops[waits], causes[waits])


def _deadlock(standstill: Standstill, step: Dependencies) -> DeadlockError:
    """Return the error that names the actions that wait for each other."""
    actions = step.actions
    waits = [[*map(step.action_of, services)] for services in standstill.services]
    shown = "; ".join(
        f"{actions.text(waiting)}, waits for {actions.name(awaited)}"
        for waiting, awaited in waits[:_SHOWN]
    )
    more = f"; and {len(waits) - _SHOWN} more ranks" if len(waits) > _SHOWN else ""
    return DeadlockError(
        f"the order of the programs contradicts itself: {shown}{more}", *actions.place(waits[0][0])
    )
