"""Result of simulating a step, without the times of its actions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sppo.schedule.costs import Costs, Table
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import run_clock
from sppo.schedule.simulation.memory_track import SimulatedProgram, peak_held_bytes
from sppo.schedule.timeline import Floats, IdleCause

IDLE_CAUSES: tuple[IdleCause, ...] = ("bubble", "communication", "copy")


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedStep:
    """Result of one simulated step.

    Attributes:
        step_s: Seconds from 0 to the end of the last action of any rank.
        idle_s: Seconds that each rank's compute waits by cause, [ranks, causes], in the order of
            `IDLE_CAUSES`.
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
        if cause is None:
            return float(self.idle_s[rank].sum())
        return float(self.idle_s[rank, IDLE_CAUSES.index(cause)])

    @property
    def exposed_copy_s(self) -> float:
        """Seconds of waits for copies on the rank that waits longest for copies."""
        return float(self.idle_s[:, IDLE_CAUSES.index("copy")].max())


def simulate_step(schedule: Schedule, *, costs: Costs) -> SimulatedStep:
    """Return step time, idle times and peak memory of a step, as those of its timeline."""
    clock = run_clock(schedule, costs=costs)
    held = [
        peak_held_bytes(
            schedule,
            simulated=SimulatedProgram(rank, program, starts, finishes),
            groups=schedule.msp_groups,
            costs=costs,
        )
        for rank, (program, starts, finishes) in enumerate(
            zip(schedule.encoded, clock.starts_s, clock.finishes_s, strict=True)
        )
    ]
    return SimulatedStep(clock.end_s, clock.idle_s, np.array(held))
