"""Simulation of a schedule with a cost model: times of actions, waits, memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sppo.schedule.actions import NUM_COMPUTE, Op
from sppo.schedule.costs import CopyEngines, Costs, Table
from sppo.schedule.graph import NOWHERE, Edges, Floats, Ints, longest_paths
from sppo.schedule.memory_track import peak_held_bytes
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.dependencies import Dependencies
from sppo.schedule.timeline import (
    BUBBLE,
    CAUSES,
    COMMUNICATION,
    COPY,
    IdleCause,
    Timeline,
)

_SHOWN = 4


class DeadlockError(RuntimeError):
    """Error of a schedule whose ranks wait for each other: the order of the programs has a cycle.

    No request causes it, but a bug of what made the programs.

    Args:
        problem: What waits.
        schedule: Schedule of the actions.
        stuck: Actions that never happen, in the order of the programs.

    Attributes:
        rank: First rank that cannot proceed.
        index: Position in the program of that rank at which it waits, from 0.
    """

    def __init__(self, problem: str, schedule: Schedule, stuck: Ints) -> None:
        ranks, firsts = np.unique(schedule.ranks[stuck], return_index=True)
        shown = "; ".join(map(schedule.text_with_place, stuck[firsts][:_SHOWN].tolist()))
        more = f"; and {ranks.size - _SHOWN} more ranks" if ranks.size > _SHOWN else ""
        super().__init__(f"{problem}: {shown}{more}")
        self.rank, self.index = schedule.place(int(stuck[0]))


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedStep:
    """Result of one simulated step, without the times of its actions.

    Attributes:
        step_s: Seconds from 0 to the end of the last action of any rank.
        idle_s: Seconds that each rank's compute waits by cause, [ranks, causes], in the order of
            `CAUSES`.
        held_bytes: Peak bytes that each rank holds of saved activations, K/V and their gradients,
            [ranks].
    """

    step_s: float
    idle_s: Table
    held_bytes: Floats

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of the step: idle time of all ranks, whatever its cause, over all time."""
        total = len(self.idle_s) * self.step_s
        return float(self.idle_s.sum()) / total if total else 0.0

    def waited_s(self, rank: int, cause: IdleCause | None = None) -> float:
        """Return the seconds that a rank is idle, for one cause or for all."""
        own = self.idle_s[rank]
        return float(own.sum() if cause is None else own[CAUSES.index(cause)])

    @property
    def exposed_copy_s(self) -> float:
        """Seconds of waits for copies on the rank that waits longest for copies."""
        return float(self.idle_s[:, COPY].max())


def simulate(schedule: Schedule, *, costs: Costs, seconds: Floats | None = None) -> Timeline:
    """Return the timeline of one step of `schedule`.

    Resources per rank are its compute, one copy engine per tier and direction and one link per
    directed pair of ranks; each serves in program order (`dependencies` lists what else an action
    waits for). Schedules with and without message and copy actions can be simulated.

    Args:
        schedule: A valid schedule.
        costs: Costs for its stages and units.
        seconds: Seconds of each action, rank after rank, which replace those of `costs`; NaN
            replaces nothing. An MSP group takes those of its longest shard.

    Raises:
        DeadlockError: Actions wait for each other in a cycle; the message names the actions.
    """
    step = Dependencies(schedule, costs=costs, seconds=seconds)
    edges = step.edges
    ends = longest_paths(edges, seconds=step.seconds, ranks=step.ranks, turns=step.turns)
    stuck = np.flatnonzero(np.isinf(ends) & (step.ranks != NOWHERE))
    if stuck.size:
        problem = "the order of the programs contradicts itself"
        raise DeadlockError(problem, schedule, np.unique(step.action_of(stuck)))
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
    starts, finishes = starts[: never + 1], finishes[: never + 1]
    waits = _waits(step, ends, ready, until=float(finishes.max()))
    return Timeline(schedule, "simulated", starts, finishes, waits, costs)


def simulate_step(schedule: Schedule, *, costs: Costs) -> SimulatedStep:
    """Return step time, idle times and peak memory of a step, as those of its timeline."""
    played = simulate(schedule, costs=costs)
    held_bytes = peak_held_bytes(
        schedule, starts_s=played.starts_s, finishes_s=played.finishes_s, costs=costs
    )
    return SimulatedStep(played.makespan_s, played.idle_s, held_bytes)


def step_seconds(timeline: Timeline, *, costs: Costs) -> float:
    """Return the simulated seconds of a timeline's program with the timeline's compute times.

    A step takes another time than planned because its compute takes another time, or because ranks
    wait another time between compute actions: for messages, or for copies that are actions of their
    own. This simulation separates the two: it differs from the measured step by the time between
    compute actions alone. What a rank waits for inside an action, such as copies of saved tensors,
    counts as compute, because a run measures it so.

    Args:
        timeline: Timeline of the program, planned or measured.
        costs: Planned costs of the step, of which those of messages are used. Copies cost nothing.
    """
    codes = timeline.schedule.codes[:-1]
    seconds = (timeline.finishes_s - timeline.starts_s)[:-1]
    seconds[(codes >= NUM_COMPUTE) & (codes != Op.REDUCE)] = np.nan
    free = replace(costs, copies=CopyEngines(), state_copies=None, layer_copies=())
    return simulate(timeline.schedule, costs=free, seconds=seconds).makespan_s


def _waits(step: Dependencies, ends: Floats, ready: Floats, *, until: float) -> Floats:
    """Return the waits of compute, as those of :class:`sppo.schedule.timeline.Timeline`.

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
    between = np.stack([ranks, begins, stops, causes])[:, is_wait]
    behind = np.broadcast_arrays(every_rank[idles], busy_until[idles], until, BUBBLE)
    return np.hstack([between, np.stack(behind)])
