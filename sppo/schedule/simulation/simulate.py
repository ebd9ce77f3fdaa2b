"""Simulation of a schedule with a cost model: times of actions, waits, memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sppo.schedule.actions import NUM_COMPUTE, Op
from sppo.schedule.costs import CopyEngines, Costs, Table
from sppo.schedule.graph import Floats
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import Clock, run_clock
from sppo.schedule.simulation.dependencies import BUBBLE, COMMUNICATION, COPY
from sppo.schedule.simulation.memory_track import memory_tracks, peak_held_bytes
from sppo.schedule.timeline import Idle, IdleCause, RankTrack, Timeline

CAUSES: dict[IdleCause, int] = {"bubble": BUBBLE, "communication": COMMUNICATION, "copy": COPY}
"""Causes of waits, by name."""
_NAMES = {cause: name for name, cause in CAUSES.items()}


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
        return float(own.sum() if cause is None else own[CAUSES[cause]])

    @property
    def exposed_copy_s(self) -> float:
        """Seconds of waits for copies on the rank that waits longest for copies."""
        return float(self.idle_s[:, COPY].max())


def simulate_step(schedule: Schedule, *, costs: Costs) -> SimulatedStep:
    """Return step time, idle times and peak memory of a step, as those of its timeline."""
    clock = run_clock(schedule, costs=costs)
    idle_s, waits = np.zeros((schedule.num_ranks, len(CAUSES))), clock.waits
    np.add.at(idle_s, (waits.ranks, waits.causes), waits.ends_s - waits.begins_s)
    held_bytes = peak_held_bytes(schedule, clock=clock, costs=costs)
    return SimulatedStep(clock.end_s, idle_s, held_bytes)


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
    ranks = schedule.ranks
    columns = zip(
        schedule.programs,
        memory_tracks(schedule, clock=clock, costs=costs),
        schedule.peak_in_flight,
        strict=True,
    )
    tracks = tuple(
        RankTrack(
            program,
            clock.starts_s[ranks == rank],
            clock.finishes_s[ranks == rank],
            _idle(clock, rank=rank),
            memory,
            in_flight,
        )
        for rank, (program, memory, in_flight) in enumerate(columns)
    )
    return Timeline(schedule, "simulated", clock.end_s, tracks)


def _idle(clock: Clock, *, rank: int) -> tuple[Idle, ...]:
    """Return the waits of one rank."""
    own = clock.waits.ranks == rank
    _, *columns = (column[own].tolist() for column in clock.waits)
    return tuple(
        Idle(begin, end, _NAMES[cause]) for begin, end, cause in zip(*columns, strict=True)
    )


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
    seconds = np.concatenate([track.finish_s - track.start_s for track in timeline.ranks])
    seconds[(codes >= NUM_COMPUTE) & (codes != Op.REDUCE)] = np.nan
    free = replace(costs, copies=CopyEngines(), state_copies=None, layer_copies=())
    return run_clock(timeline.schedule, costs=free, seconds=seconds).end_s
