"""From a generated schedule to the one that runs: copies, messages, and proof of both.

generate -> validate -> place copies -> place messages -> validate again -> replay. Everything is a
pure function of its arguments, so every rank gets the same program and compares a digest of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sppo.schedule.actions import ActionKind, Schedule
from sppo.schedule.checks.deadlock import replay
from sppo.schedule.checks.validate import validate
from sppo.schedule.communication import place_messages
from sppo.schedule.copies import place_copies
from sppo.schedule.costs import Costs


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A schedule and what it costs: all that a simulation needs."""

    schedule: Schedule
    costs: Costs


def lower(schedule: Schedule, *, costs: Costs, prefetch: int = 1) -> Schedule:
    """`schedule` with its copies and messages, checked.

    Args:
        schedule: Compute actions only.
        costs: Units with `offload_bytes` above 0 get copies; times order the messages.
        prefetch: How many backwards ahead a unit comes back from the host.

    Raises:
        ScheduleError: the schedule breaks a rule.
        DeadlockError: its messages would wait for each other.
    """
    validate(schedule)
    schedule = place_copies(schedule, offloaded=costs.offload_bytes > 0, prefetch=prefetch)
    schedule = place_messages(schedule, costs=costs)
    validate(schedule)
    replay(schedule)
    return schedule


def forward_part(schedule: Schedule) -> Schedule:
    """Only the forwards of `schedule`, in their order: the program of an evaluation."""
    programs = tuple(
        tuple(action for action in program if action.kind is ActionKind.F)
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)
