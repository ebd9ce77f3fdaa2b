"""Times of all actions of a step, and the waits of each rank's compute with their causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sppo.schedule.costs import Costs
from sppo.schedule.encoding import D2H, D2H_KV, NUM_COMPUTE, EncodedProgram
from sppo.schedule.graph import Floats, Ints, Standstill, longest_paths
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.dependencies import BUBBLE, COMMUNICATION, COPY, Dependencies

_SHOWN = 4


class DeadlockError(ValueError):
    """Error of a schedule whose ranks wait for each other: the order of the programs has a cycle.

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
        gaps: Waits before compute and for reductions. There are none behind a rank's last action.
    """

    starts_s: Sequence[Floats]
    finishes_s: Sequence[Floats]
    gaps: Gaps

    @property
    def end_s(self) -> float:
        """End of the last action."""
        return max(float(times.max(initial=0.0)) for times in self.finishes_s)


def run_clock(
    schedule: Schedule,
    *,
    costs: Costs,
    programs: Sequence[EncodedProgram] | None = None,
    seconds: Floats | None = None,
) -> Clock:
    """Simulate a step once.

    Args:
        schedule: Schedule of the step.
        costs: Costs of the actions.
        programs: Encoded programs of the ranks; those of `schedule` if not given.
        seconds: Seconds of each action, rank after rank, which replace those of `costs`; NaN
            replaces nothing. An MSP group takes those of its longest shard.

    Raises:
        DeadlockError: Actions wait for each other in a cycle; the message names the actions.
    """
    programs = schedule.encoded if programs is None else programs
    step = Dependencies(schedule, programs=programs, costs=costs, seconds=seconds)
    edges = step.edges
    try:
        ends = longest_paths(edges, seconds=step.seconds, ranks=step.ranks, turns=step.turns)
    except Standstill as standstill:
        raise _deadlock(standstill, step) from None
    ready = [
        edges.where(edges.cause == cause).starts_s(ends) for cause in (BUBBLE, COMMUNICATION, COPY)
    ]
    ready[BUBBLE] = np.maximum(ready[BUBBLE], step.implied.starts_s(ends))
    made, sent, starts = np.maximum.accumulate(ready)
    gaps = _gaps(step, ends, made, sent, starts)
    # Copies out may wait on the way for blocks that are not made yet.
    out = step.actions.of(D2H, D2H_KV)
    starts[out] = sent[out]
    finishes = np.maximum(ends, step.last_blocks.starts_s(ends))
    finishes[: step.latency_s.size] += step.latency_s
    parts = np.cumsum([program.codes.size for program in programs])
    return Clock(np.split(starts, parts)[:-1], np.split(finishes, parts)[:-1], gaps)


def _gaps(step: Dependencies, ends: Floats, made: Floats, sent: Floats, starts: Floats) -> Gaps:
    """Return the waits of compute from when each service could start as far as each cause tells."""
    services, ranks = step.compute_services, step.actions.ranks[step.compute]
    waiting = np.where(
        services < step.inputs.size, step.inputs[services % step.inputs.size], services
    )
    free = np.append(0.0, ends[services][:-1])
    free[np.diff(ranks, prepend=-1) > 0] = 0.0
    computed = np.maximum(free, made[waiting])
    delivered = np.maximum(computed, sent[waiting])
    started = np.maximum(delivered, starts[waiting])
    reduced = np.where(step.actions.codes[step.compute] < NUM_COMPUTE, started, ends[services])
    moments = np.stack([free, computed, delivered, started, reduced], axis=1)
    begins, stops = moments[:, :-1].ravel(), moments[:, 1:].ravel()
    causes = np.tile([BUBBLE, COMMUNICATION, COPY, COMMUNICATION], services.size)
    waits = stops > begins
    return Gaps(np.repeat(ranks, 4)[waits], begins[waits], stops[waits], causes[waits])


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
