"""Simulation of a schedule with a cost model: times of actions, waits, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sppo.schedule.costs import CopyEngines, Costs
from sppo.schedule.encoding import NUM_COMPUTE, REDUCE
from sppo.schedule.in_flight import peak_in_flight
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import Clock, run_clock
from sppo.schedule.simulation.dependencies import BUBBLE, COMMUNICATION, COPY
from sppo.schedule.simulation.memory_track import SimulatedProgram, memory_tracks
from sppo.schedule.timeline import Idle, IdleCause, RankTrack, Timeline

_CAUSES: Mapping[int, IdleCause] = {
    BUBBLE: "bubble",
    COMMUNICATION: "communication",
    COPY: "copy",
}


def simulate(schedule: Schedule, *, costs: Costs) -> Timeline:
    """Return the timeline of one step of `schedule`.

    Resources per rank are its compute, one copy engine per tier and direction and one link per
    directed pair of ranks; each serves in program order (`dependencies` lists what else an action
    waits for). Schedules with and without message and copy actions can be simulated.

    Args:
        schedule: A valid schedule.
        costs: Costs for its stages and units.

    Raises:
        DeadlockError: Programs that wait for each other in a cycle.
    """
    clock = run_clock(schedule, costs=costs)
    tracks = []
    for rank, program in enumerate(schedule.encoded):
        starts, finishes = clock.starts_s[rank], clock.finishes_s[rank]
        busy_until = float(finishes[program.codes < NUM_COMPUTE].max(initial=0.0))
        tracks.append(
            RankTrack(
                schedule.programs[rank],
                starts,
                finishes,
                _idle(clock, rank=rank, busy_until_s=busy_until),
                memory_tracks(
                    schedule,
                    simulated=SimulatedProgram(rank, program, starts, finishes),
                    groups=schedule.msp_groups,
                    costs=costs,
                ),
                peak_in_flight(program, groups=schedule.msp_groups),
            )
        )
    return Timeline(schedule, "simulated", clock.end_s, tuple(tracks))


def _idle(clock: Clock, *, rank: int, busy_until_s: float) -> tuple[Idle, ...]:
    """Return a rank's gaps with their causes, and the bubble after its last compute action."""
    own = (clock.gaps.ranks == rank) & (clock.gaps.begins_s < busy_until_s)
    columns = (clock.gaps.begins_s, clock.gaps.ends_s, clock.gaps.causes)
    gaps = [
        Idle(begin, end, _CAUSES[cause])
        for begin, end, cause in zip(*(column[own].tolist() for column in columns), strict=True)
    ]
    if clock.end_s > busy_until_s:
        gaps.append(Idle(busy_until_s, clock.end_s, "bubble"))
    return tuple(gaps)


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
    seconds = [
        np.where(
            (program.codes < NUM_COMPUTE) | (program.codes == REDUCE),
            track.finish_s - track.start_s,
            np.nan,
        )
        for track, program in zip(timeline.ranks, timeline.schedule.encoded, strict=True)
    ]
    free = replace(costs, copies=CopyEngines(), state_copies=None, layer_copies=())
    return run_clock(timeline.schedule, costs=free, seconds=np.concatenate(seconds)).end_s
