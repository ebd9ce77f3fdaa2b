"""Times of all actions of a step, and the waits of each rank's compute with their causes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sppo.schedule.actions import NUM_COMPUTE, Op
from sppo.schedule.costs import Costs
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


class Waits(NamedTuple):
    """Times in which compute of a rank waits, rank after rank in order, one entry each."""

    ranks: Ints
    begins_s: Floats
    ends_s: Floats
    causes: Ints
    """BUBBLE, COMMUNICATION or COPY."""


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """Times of all actions of a step.

    Attributes:
        starts_s: Start of each of `Schedule.actions`; 0 for the action that never happens.
        finishes_s: End of each action; of a SEND, the arrival of its message.
        waits: Waits of each rank for its compute, between it, and behind it to the step's end.
    """

    starts_s: Floats
    finishes_s: Floats
    waits: Waits

    @property
    def end_s(self) -> float:
        """End of the last action."""
        return float(self.finishes_s.max(initial=0.0))


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
    starts, out = ready[COPY].copy(), step.schedule.of(Op.D2H, Op.D2H_KV)
    starts[out] = ready[COMMUNICATION][out]
    finishes = np.maximum(ends, step.last_blocks.starts_s(ends))
    finishes[: step.latency_s.size] += step.latency_s
    never = step.schedule.never
    starts[never] = finishes[never] = 0.0
    waits = _waits(step, ends, ready, until=float(finishes[: never + 1].max()))
    return Clock(starts[: never + 1], finishes[: never + 1], waits)


def _waits(step: Dependencies, ends: Floats, ready: Floats, *, until: float) -> Waits:
    """Return the waits of compute.

    Args:
        step: Services of the step.
        ends: End of each service.
        ready: When each service could start as far as one, two, or all causes tell, [3, services].
        until: End of the step.
    """
    compute, every_rank = step.schedule.compute, np.arange(step.schedule.num_ranks)
    busy_until = np.zeros(every_rank.size)
    np.maximum.at(busy_until, step.schedule.ranks[compute], ends[compute])
    actions, services, waiting = step.compute
    ranks = step.schedule.ranks[actions]
    free = np.append(0.0, ends[services][:-1])
    free[np.diff(ranks, prepend=-1) > 0] = 0.0
    moments = np.maximum.accumulate([free, *(times[waiting] for times in ready)])
    occupied = np.where(step.schedule.codes[actions] < NUM_COMPUTE, moments[-1], ends[services])
    begins, stops = moments.T.ravel(), np.vstack([moments[1:], occupied]).T.ravel()
    ranks = np.repeat(ranks, len(moments))
    causes = np.tile([BUBBLE, COMMUNICATION, COPY, COMMUNICATION], services.size)
    is_wait = (stops > begins) & (begins < busy_until[ranks])
    idles = busy_until < until
    return Waits(
        np.append(ranks[is_wait], every_rank[idles]),
        np.append(begins[is_wait], busy_until[idles]),
        np.append(stops[is_wait], np.full(idles.sum(), until)),
        np.append(causes[is_wait], np.full(idles.sum(), BUBBLE)),
    )


def _deadlock(standstill: Standstill, step: Dependencies) -> DeadlockError:
    """Return the error that names the actions that wait for each other."""
    schedule = step.schedule
    waits = [[*map(step.action_of, services)] for services in standstill.services]
    shown = "; ".join(
        f"{schedule.text_with_place(waiting)}, waits for {schedule.text(awaited)}"
        for waiting, awaited in waits[:_SHOWN]
    )
    more = f"; and {len(waits) - _SHOWN} more ranks" if len(waits) > _SHOWN else ""
    return DeadlockError(
        f"the order of the programs contradicts itself: {shown}{more}", *schedule.place(waits[0][0])
    )
