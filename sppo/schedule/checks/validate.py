"""Validation of schedules, without any timing.

Rules, each with the failure that it prevents:

* coverage: every F once per stage and unit, every B once (unless evaluation), W, D2H and H2D at
  most once. A duplicate would add its gradients twice. No copy without its counterpart; K and V of
  a sequence leave a stage for all units, or none.
* placement: a stage's whole units run on its rank; the shards of a cut unit on as many ranks as
  there are shards, one of them the owner; B on the ranks of its F, because they hold its tensors.
* forward order: F of subsequence i after F of i - 1 on the same stage, whose K/V it reads.
* backward order: B after its F, and after B of subsequence i + 1, which completes its dK/dV.
* weight order: W after its B.
* copy order: D2H after F, H2D after D2H and before B; all H2Ds of K and V (or KVs, if they are
  recomputed) before the first B that reads them.
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

import numpy as np

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
    EncodedProgram,
    F,
    W,
)
from sppo.schedule.graph import Flags, Ints
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import DeadlockError, run_clock
from sppo.schedule.simulation.step_actions import StepActions

_SHOWN = 8


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError if `schedule`, with or without copies and messages, breaks a rule.

    Raises:
        ScheduleError: A schedule that breaks rules; the message names the first offending actions.
    """
    violations = find_violations(schedule)
    if violations:
        raise ScheduleError(schedule.name, violations=violations)


def validate_rules(schedule: Schedule) -> None:
    """Raise ScheduleError if `schedule` breaks any rule except "no deadlock", which is not checked.

    Raises:
        ScheduleError: A schedule that breaks rules; the message names the first offending actions.
    """
    violations = _broken_rules(schedule, programs=schedule.encoded)
    if violations:
        raise ScheduleError(schedule.name, violations=violations)


def find_violations(schedule: Schedule) -> tuple[Violation, ...]:
    """Return all violations of `schedule`; rules about order are checked only if coverage holds."""
    programs = schedule.encoded
    return _broken_rules(schedule, programs=programs) or _deadlock(schedule)


def _broken_rules(
    schedule: Schedule, *, programs: Sequence[EncodedProgram]
) -> tuple[Violation, ...]:
    """Return the violations of all rules except "no deadlock"."""
    found = coverage_problems(schedule, programs=programs)
    if found:
        return tuple(found)
    found = _order_problems(schedule)
    if not found:
        found += message_problems(schedule, programs=programs)
    return tuple(found)


def _order_problems(schedule: Schedule) -> list[Violation]:
    """Check the rules about the order within the program of each rank."""
    actions = StepActions(schedule)
    units = actions.ranks * actions.size + actions.slots
    counts = [*map(len, schedule.lengths)]
    before = np.concatenate([np.arange(count) for count in counts])[actions.units]
    behind = np.repeat(counts, counts)[actions.units] - 1 - before
    forward, backward = actions.of(F), actions.of(B)
    found: list[Violation] = []
    for rule, later, needed, earlier in (
        ("forward order", forward[before[forward] > 0], units - 1, F),
        ("backward order", backward[behind[backward] > 0], units + 1, B),
        ("backward order", backward, units, F),
        ("weight order", actions.of(W), units, B),
        ("copy order", actions.of(D2H, D2H_KV, KV), units, F),
        ("copy order", actions.of(H2D), units, D2H),
        ("copy order", backward, units, H2D),
        ("copy order", actions.of(H2D_KV), units, D2H_KV),
        ("message place", actions.of(SEND_ACT), units, F),
        ("message place", actions.of(SEND_GRAD), units, B),
        ("message place", forward, units, RECV_ACT),
        ("message place", backward, units, RECV_GRAD),
    ):
        late = actions.after(later, actions.of(earlier), of=needed, among=units)
        found += _too_early(actions, rule, later, *late)
    last, sequences = backward[behind[backward] == 0], units - before
    late = actions.after(last, actions.of(H2D_KV, KV), of=sequences)
    found += _too_early(actions, "copy order", last, *late)
    found += _reduction_problems(actions, num_ranks=schedule.num_ranks)
    for rank in range(schedule.num_ranks):
        found += state_problems(schedule, rank=rank)
    return found


def _too_early(
    actions: StepActions, rule: str, early: Ints, needed: Ints, is_behind: Flags
) -> list[Violation]:
    """Return the violations of actions that stand before what they need.

    Args:
        actions: Actions of the step.
        rule: Rule that they break.
        early: Actions that need others.
        needed: First action behind each of them that it needs.
        is_behind: Whether there is one.
    """
    return [
        Violation(
            rule,
            f"{actions.name(action)} stands before {actions.name(other)}, which it needs",
            *actions.place(action),
        )
        for action, other in zip(
            early[is_behind][:_SHOWN].tolist(), needed[is_behind][:_SHOWN].tolist(), strict=True
        )
    ]


def _reduction_problems(actions: StepActions, *, num_ranks: int) -> list[Violation]:
    """Check that REDUCE occurs once per stage, after the stage's last B and W."""
    stages = actions.stages * num_ranks + actions.ranks
    reductions = actions.of(REDUCE)
    computed = np.isin(stages[reductions], stages[actions.compute])
    computed |= actions.stages[reductions] % num_ranks == actions.ranks[reductions]
    _, is_again = actions.before(reductions, reductions, of=stages)
    late, is_late = actions.after(reductions, actions.of(B, W), of=stages)
    found = []
    for place in np.flatnonzero(is_again | ~computed | is_late).tolist():
        reduction = int(reductions[place])
        name, (rank, index) = actions.name(reduction), actions.place(reduction)
        if is_again[place]:
            text = f"{name} is there twice"
        elif not computed[place]:
            stage = actions.stages[reduction]
            text = f"{name} runs on rank {rank}, which has no gradients of stage {stage}"
        else:
            other = actions.name(int(late[place]))
            text = f"{name} stands before {other}, whose gradients it would miss"
        found.append(Violation("reduction", text, rank, index))
    return found


def _deadlock(schedule: Schedule) -> tuple[Violation, ...]:
    """Simulate the schedule, and return a violation if its ranks wait for each other."""
    costs = abstract_costs(schedule.num_stages, num_units=schedule.num_units)
    try:
        run_clock(schedule, costs=costs)
    except DeadlockError as error:
        return (Violation("no deadlock", str(error), error.rank, error.index),)
    return ()
