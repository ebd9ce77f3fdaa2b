"""Simulation of a schedule with a cost model: times of actions, waits, memory."""

from __future__ import annotations

import numpy as np

from sppo.schedule.costs import Costs
from sppo.schedule.encoding import NUM_COMPUTE
from sppo.schedule.in_flight import peak_in_flight
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation import event_loop
from sppo.schedule.simulation.event_loop import Clock, run_clock
from sppo.schedule.simulation.memory_track import SimulatedProgram, memory_tracks
from sppo.schedule.timeline import Idle, IdleCause, RankTrack, Timeline

_CAUSES: dict[int, IdleCause] = {
    event_loop.BUBBLE: "bubble",
    event_loop.COMMUNICATION: "communication",
    event_loop.COPY: "copy",
}


def simulate(schedule: Schedule, *, costs: Costs) -> Timeline:
    """Return the timeline of one step of `schedule`.

    Resources per rank are its compute, one copy engine per tier and direction and one link per
    directed pair of ranks; each serves in program order (`event_loop` lists the dependencies).
    Schedules with and without message and copy actions can be simulated.

    Args:
        schedule: A valid schedule.
        costs: Costs for its stages and units.

    Raises:
        event_loop.DeadlockError: Programs that wait for each other in a cycle.
        encoding.MalformedActionError: An action outside the schedule.
    """
    programs = schedule.encoded
    clock = run_clock(schedule, programs=programs, costs=costs)
    starts = [np.array(times) for times in clock.starts_s]
    finishes = [np.array(times) for times in clock.finishes_s]
    makespan = max((float(times.max(initial=0.0)) for times in finishes), default=0.0)
    groups = schedule.msp_groups
    tracks = []
    for rank, program in enumerate(programs):
        compute = program.codes < NUM_COMPUTE
        busy_until = float(finishes[rank][compute].max(initial=0.0))
        tracks.append(
            RankTrack(
                schedule.programs[rank],
                starts[rank],
                finishes[rank],
                _idle(clock, rank=rank, busy_until_s=busy_until, makespan_s=makespan),
                memory_tracks(
                    schedule,
                    simulated=SimulatedProgram(rank, program, starts[rank], finishes[rank]),
                    groups=groups,
                    costs=costs,
                ),
                peak_in_flight(program, groups=groups),
            )
        )
    return Timeline(schedule, "simulated", makespan, tuple(tracks))


def _idle(clock: Clock, *, rank: int, busy_until_s: float, makespan_s: float) -> tuple[Idle, ...]:
    """Return a rank's gaps with their causes, and the bubble after its last compute action."""
    gaps = [
        Idle(begin, end, _CAUSES[cause])
        for begin, end, cause in clock.gaps[rank]
        if begin < busy_until_s
    ]
    if makespan_s > busy_until_s:
        gaps.append(Idle(busy_until_s, makespan_s, "bubble"))
    return tuple(gaps)
