"""Validation of schedules, without any timing.

Rules, each with the failure that it prevents:

* coverage: every F once per stage and unit, every B once (unless evaluation), W, D2H and H2D at
  most once. A duplicate would add its gradients twice.
* placement: a stage's whole units run on its rank; the shards of a cut unit on as many ranks as
  there are shards, one of them the owner; B on the ranks of its F, because they hold its tensors.
* forward order: F of subsequence i after F of i - 1 on the same stage, whose K/V it reads.
* backward order: B after its F, and after B of subsequence i + 1, which completes its dK/dV.
* weight order: W after its B.
* copy order: D2H after F, H2D after D2H and before B, none without the other; copies of K and V for
  all units of a sequence on a stage or for none, and all H2Ds (or KVs, if K and V are recomputed)
  before the first B that reads them.
* message coverage: with any message in the schedule, exactly the needed messages.
* message place: SEND after the action that makes the tensor, RECV before the action that needs it.
* message order: sends and receives of a directed edge in the same order; any other order delivers a
  tensor of another unit, or none.
* state order: if weights live in another tier, compute reads only weights of the two stages that
  were fetched last; gradients are back before further additions, and leave after their REDUCE.
* reduction: REDUCE at most once per stage, after its last B or W.
* no deadlock: the order of all ranks together has no cycle. Only checked if all other rules hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sppo.schedule import encoding
from sppo.schedule.checks.coverage import coverage_problems, message_problems
from sppo.schedule.checks.state_order import state_problems
from sppo.schedule.checks.violations import ScheduleError, Violation
from sppo.schedule.costs import abstract_costs
from sppo.schedule.encoding import (
    D2H,
    D2H_KV,
    H2D,
    H2D_KV,
    KV,
    RECV_ACT,
    RECV_GRAD,
    REDUCE,
    SEND_ACT,
    SEND_GRAD,
    B,
    Codes,
    EncodedProgram,
    F,
    MalformedActionError,
    W,
)
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.event_loop import DeadlockError, run_clock

_MISSING = -1


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError if `schedule`, with or without copies and messages, breaks a rule.

    Raises:
        ScheduleError: A schedule that breaks rules; the message names the first offending actions.
    """
    violations = find_violations(schedule)
    if violations:
        raise ScheduleError(schedule.name, violations=violations)


def validate_rules(schedule: Schedule) -> tuple[EncodedProgram, ...]:
    """Raise ScheduleError if `schedule` breaks any rule except "no deadlock", which is not checked.

    Returns:
        Encoded programs of the schedule.

    Raises:
        ScheduleError: A schedule that breaks rules; the message names the first offending actions.
    """
    programs, violations = _encoded(schedule)
    violations = violations or _broken_rules(schedule, programs=programs)
    if violations:
        raise ScheduleError(schedule.name, violations=violations)
    return programs


def find_violations(schedule: Schedule) -> tuple[Violation, ...]:
    """Return all violations of `schedule`; rules about order are checked only if coverage holds."""
    programs, violations = _encoded(schedule)
    return (
        violations
        or _broken_rules(schedule, programs=programs)
        or _deadlock(schedule, programs=programs)
    )


def _encoded(schedule: Schedule) -> tuple[tuple[EncodedProgram, ...], tuple[Violation, ...]]:
    """Return the encoded programs of `schedule`, or the violation that prevents encoding."""
    try:
        return schedule.encoded, ()
    except MalformedActionError as error:
        return (), (Violation("well formed", str(error), error.rank, error.index),)


def _broken_rules(
    schedule: Schedule, *, programs: Sequence[EncodedProgram]
) -> tuple[Violation, ...]:
    """Return the violations of all rules except "no deadlock"."""
    found = coverage_problems(schedule, programs=programs)
    if found:
        return tuple(found)
    for rank in range(schedule.num_ranks):
        found += _order_problems(schedule, rank=rank, program=programs[rank])
    if not found:
        found += message_problems(schedule, programs=programs)
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Positions:
    """Positions of each kind of action in one rank's program, for each of its slots."""

    schedule: Schedule
    rank: int
    slots: Codes
    first: dict[int, npt.NDArray[np.int64]]
    last: dict[int, npt.NDArray[np.int64]]

    def sequence_ends(self) -> npt.NDArray[np.int64]:
        """Return each slot's index in `slots` of its sequence's last unit on the same stage.

        A slot whose sequence has no such unit on the rank has its own index.
        """
        schedule = self.schedule
        ends = np.cumsum([len(parts) for parts in schedule.lengths]) - 1
        stages, units = np.divmod(self.slots, schedule.num_units)
        last = stages * schedule.num_units + ends[np.searchsorted(ends, units)]
        found = np.searchsorted(self.slots, last)
        return np.where(np.isin(last, self.slots), found, np.arange(self.slots.size))

    def index(self, code: int, slot_index: int) -> int:
        """Return the position of the last action of a kind for one of the slots."""
        return int(self.last[code][slot_index])


def _positions(schedule: Schedule, *, rank: int, program: EncodedProgram) -> _Positions:
    slots = np.unique(program.slots[program.codes < REDUCE])
    first, last = {}, {}
    position = np.arange(program.codes.size)
    for code in range(REDUCE):
        which = program.codes == code
        at = np.searchsorted(slots, program.slots[which])
        first[code] = np.full(slots.shape, _MISSING)
        last[code] = np.full(slots.shape, _MISSING)
        # A cut unit has several messages; the first and the last one count.
        last[code][at] = position[which]
        first[code][at[::-1]] = position[which][::-1]
    return _Positions(schedule, rank, slots, first, last)


def _order_problems(schedule: Schedule, *, rank: int, program: EncodedProgram) -> list[Violation]:
    """Check the rules about the order within one rank's program."""
    at = _positions(schedule, rank=rank, program=program)
    found: list[Violation] = []
    units = at.slots % schedule.num_units
    follows = ~encoding.first_subsequence(schedule.lengths)[units]
    neighbour = np.zeros(at.slots.shape, dtype=bool)
    neighbour[1:] = np.diff(at.slots) == 1
    pairs = np.flatnonzero(neighbour & follows)
    if pairs.size:
        found += _must_follow(at, "forward order", F, pairs, F, pairs - 1)
        found += _must_follow(at, "backward order", B, pairs - 1, B, pairs)
    last = at.sequence_ends()
    for code in (H2D_KV, KV):
        found += _must_follow(at, "copy order", B, last, code, np.arange(at.slots.size))
    every = np.arange(at.slots.size)
    for rule, later, earlier in (
        ("backward order", B, F),
        ("weight order", W, B),
        ("copy order", D2H, F),
        ("copy order", H2D, D2H),
        ("copy order", B, H2D),
        ("copy order", D2H_KV, F),
        ("copy order", H2D_KV, D2H_KV),
        ("copy order", KV, F),
        ("message place", SEND_ACT, F),
        ("message place", SEND_GRAD, B),
        ("message place", F, RECV_ACT),
        ("message place", B, RECV_GRAD),
    ):
        found += _must_follow(at, rule, later, every, earlier, every)
    found += _reduction_problems(schedule, rank=rank, program=program)
    return found + state_problems(schedule, rank=rank)


def _must_follow(
    at: _Positions,
    rule: str,
    later: int,
    later_slots: npt.NDArray[np.int64],
    earlier: int,
    earlier_slots: npt.NDArray[np.int64],
) -> list[Violation]:
    """Check that `later`, if both actions exist, comes after the last `earlier`."""
    after, before = at.first[later][later_slots], at.last[earlier][earlier_slots]
    wrong = np.flatnonzero((after != _MISSING) & (before != _MISSING) & (after < before))
    found = []
    program = at.schedule.programs[at.rank]
    for index in wrong[:8].tolist():
        place = int(after[index])
        text = f"{program[place]} stands before {program[int(before[index])]}, which it needs"
        found.append(Violation(rule, text, at.rank, place))
    return found


def _reduction_problems(
    schedule: Schedule, *, rank: int, program: EncodedProgram
) -> list[Violation]:
    """Check that REDUCE occurs once per stage, after the stage's last B and W."""
    found = []
    seen: set[int] = set()
    backward = (program.codes == B) | (program.codes == W)
    stages = program.slots // schedule.num_units
    for index in np.flatnonzero(program.codes == REDUCE).tolist():
        stage = int(program.slots[index])
        action = schedule.programs[rank][index]
        behind = np.flatnonzero(backward[index:] & (stages[index:] == stage))
        if stage in seen:
            found.append(Violation("reduction", f"{action} is there twice", rank, index))
        elif schedule.placement.rank_of(stage) != rank and not _helps(
            program, stage=stage, num_units=schedule.num_units
        ):
            text = f"{action} runs on rank {rank}, which has no gradients of stage {stage}"
            found.append(Violation("reduction", text, rank, index))
        elif behind.size:
            late = schedule.programs[rank][index + int(behind[0])]
            text = f"{action} stands before {late}, whose gradients it would miss"
            found.append(Violation("reduction", text, rank, index))
        seen.add(stage)
    return found


def _helps(program: EncodedProgram, *, stage: int, num_units: int) -> bool:
    compute = program.codes < encoding.NUM_COMPUTE
    return bool((program.slots[compute] // num_units == stage).any())


def _deadlock(schedule: Schedule, *, programs: Sequence[EncodedProgram]) -> tuple[Violation, ...]:
    """Simulate the schedule, and return a violation if its ranks wait for each other."""
    costs = abstract_costs(schedule.num_stages, num_units=schedule.num_units)
    try:
        run_clock(schedule, programs=programs, costs=costs)
    except DeadlockError as error:
        return (Violation("no deadlock", str(error), error.rank, error.index),)
    return ()
