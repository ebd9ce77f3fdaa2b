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

import numpy as np

from sppo.schedule.actions import RESIDENT_STAGES
from sppo.schedule.checks.coverage import coverage_problems
from sppo.schedule.checks.violations import ScheduleError, Violation
from sppo.schedule.costs import abstract_costs
from sppo.schedule.encoding import (
    D2H,
    D2H_GRADIENTS,
    D2H_KV,
    H2D,
    H2D_GRADIENTS,
    H2D_KV,
    H2D_WEIGHTS,
    KV,
    RECV_ACT,
    RECV_GRAD,
    REDUCE,
    SEND_ACT,
    SEND_GRAD,
    B,
    F,
    W,
)
from sppo.schedule.graph import Edges, Flags, Ints, Standstill, longest_paths
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.clock import DeadlockError, run_clock
from sppo.schedule.step_actions import StepActions

_SHOWN = 8
_SHOWN_RANKS = 4


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError if `schedule` breaks any rule except "no deadlock", which is not checked.

    Raises:
        ScheduleError: A schedule that breaks rules; the message names the first offending actions.
    """
    violations = _broken_rules(schedule)
    if violations:
        raise ScheduleError(schedule.name, violations=violations)


def find_violations(schedule: Schedule) -> list[Violation]:
    """Return all violations of `schedule`; rules about order are checked only if coverage holds."""
    violations = _broken_rules(schedule)
    if violations:
        return violations
    costs = abstract_costs(schedule.num_stages, num_units=schedule.num_units)
    try:
        run_clock(schedule, costs=costs)
    except DeadlockError as error:
        return [Violation("no deadlock", str(error), error.rank, error.index)]
    return []


def check_deadlock_free(schedule: Schedule) -> None:
    """Raise DeadlockError unless `schedule`, with its messages placed, runs to its end.

    The model is stricter than any transport. A host walks its program; SEND and RECV are appended
    to the only queue of the rank and the host walks on; the host stops at a compute action until
    that queue is empty. A message moves when it is at the head of both its sender's queue and its
    receiver's queue. So each rank runs its compute and its messages one after the other. Both ends
    of a message happen at once, and so do the shards of a unit.

    Compute waits for messages of other actions, too, because the first launch of a kernel on a GPU
    may load its code, which waits until all that was issued before has ended, messages included; so
    does an allocation that finds no memory.

    Args:
        schedule: Schedule that breaks no other rule.

    Raises:
        DeadlockError: Messages that wait for each other; the message names where the first ranks
            wait.
    """
    actions = schedule.actions
    # What happens at once waits as one action, the first of it, for all that precedes any of it.
    firsts = np.arange(actions.never + 1)
    shards, first_shards = actions.first_shards()
    firsts[shards] = first_shards
    for send, receive, step in ((SEND_ACT, RECV_ACT, 1), (SEND_GRAD, RECV_GRAD, -1)):
        received = actions.of(receive)
        senders = actions.slots[received] - step * schedule.num_units
        firsts[received] = actions.at(send, senders, actions.shards[received])
    queued = actions.of(F, B, W, KV, SEND_ACT, SEND_GRAD, RECV_ACT, RECV_GRAD)
    follows = np.flatnonzero(np.diff(actions.ranks[queued]) == 0)
    joined = np.flatnonzero(firsts != np.arange(firsts.size))
    edges = Edges.joined(
        [
            Edges.of(queued[follows], firsts[queued[follows + 1]]),
            Edges.of(firsts[joined], joined),
        ]
    )
    try:
        longest_paths(
            edges,
            seconds=np.zeros(firsts.size),
            ranks=actions.ranks,
            turns=np.arange(firsts.size),
        )
    except Standstill as standstill:
        shown = "; ".join(
            actions.text(service) for service, _ in standstill.services[:_SHOWN_RANKS]
        )
        raise DeadlockError(
            f"messages wait for each other with one queue per rank: {shown}",
            *actions.place(standstill.services[0][0]),
        ) from None


def _broken_rules(schedule: Schedule) -> list[Violation]:
    """Return the violations of all rules except "no deadlock"."""
    return coverage_problems(schedule) or _order_problems(schedule)


def _order_problems(schedule: Schedule) -> list[Violation]:
    """Check the rules about the order within the program of each rank."""
    actions = schedule.actions
    units = actions.ranks * actions.size + actions.slots
    before, behind = actions.before, actions.behind
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
        late = actions.first_after(later, actions.of(earlier), of=needed, among=units)
        found += _too_early(actions, rule, later, *late)
    last, sequences = backward[behind[backward] == 0], units - before
    late = actions.first_after(last, actions.of(H2D_KV, KV), of=sequences)
    found += _too_early(actions, "copy order", last, *late)
    reductions, of_stages = actions.of(REDUCE), actions.stages * schedule.num_ranks + actions.ranks
    late = actions.first_after(reductions, actions.of(B, W), of=of_stages)
    found += _too_early(actions, "reduction", reductions, *late)
    found += _weight_problems(actions)
    found += _gradient_problems(actions, last_stage=schedule.num_stages - 1)
    return found or _message_problems(schedule)


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


def _weight_problems(actions: StepActions) -> list[Violation]:
    """Check that compute reads only weights of the last `RESIDENT_STAGES` stages fetched."""
    fetched = actions.of(H2D_WEIGHTS)
    streaming = np.isin(actions.ranks, actions.ranks[fetched])
    reading = np.flatnonzero(streaming & np.isin(actions.codes, (F, B, KV)))
    held = np.zeros(reading.shape, dtype=bool)
    places = np.searchsorted(fetched, reading)
    for ago in range(1, RESIDENT_STAGES + 1):
        there = fetched[np.maximum(0, places - ago)]
        same = (actions.ranks[there] == actions.ranks[reading]) & (places >= ago)
        held |= same & (actions.stages[there] == actions.stages[reading])
    return [
        Violation(
            "state order",
            f"{actions.name(action)} reads weights of a stage that are not here",
            *actions.place(action),
        )
        for action in reading[~held][:_SHOWN].tolist()
    ]


def _gradient_problems(actions: StepActions, *, last_stage: int) -> list[Violation]:
    """Check that gradients are on the device before additions, and that all leave in the end."""
    leaving, back = actions.of(D2H_GRADIENTS), actions.of(H2D_GRADIENTS)
    streaming = np.isin(actions.ranks, actions.ranks[np.append(leaving, back)])
    adds = np.isin(actions.codes, (B, W))
    adds |= (actions.codes == F) & (actions.stages == last_stage)
    adding = np.flatnonzero(streaming & adds)
    reducing = np.flatnonzero(streaming & (actions.codes == REDUCE))
    stages = actions.stages * (1 + actions.ranks.max()) + actions.ranks
    present = np.sort(np.concatenate([adding, leaving, back]))

    def have_left(some: Ints) -> Flags:
        last, is_there = actions.last_before(some, present, of=stages)
        is_there &= actions.codes[last] == D2H_GRADIENTS
        return is_there

    _, is_followed = actions.first_after(present, present, of=stages)
    ends = present[~is_followed]
    _, is_made = actions.last_before(leaving, present, of=stages)
    return [
        Violation("state order", f"{actions.name(action)} {problem}", *actions.place(action))
        for wrong, problem in (
            (adding[have_left(adding)], "adds to gradients that have left"),
            (reducing[have_left(reducing)], "reduces gradients that have left"),
            (back[~have_left(back)], "brings back gradients that have not left"),
            (leaving[have_left(leaving) | ~is_made], "takes gradients away that are not here"),
            (ends[actions.codes[ends] != D2H_GRADIENTS], "leaves gradients that do not leave"),
        )
        for action in wrong[:_SHOWN].tolist()
    ]


def _message_problems(schedule: Schedule) -> list[Violation]:
    """Check that messages from one rank to another are received in the order of their sends."""
    actions = schedule.actions
    found = []
    for send, receive, step in ((SEND_ACT, RECV_ACT, 1), (SEND_GRAD, RECV_GRAD, -1)):
        sends = actions.of(send)
        consumers = actions.slots[sends] + step * schedule.num_units
        receives = actions.at(receive, consumers, actions.shards[sends])
        links = actions.ranks[sends] * schedule.num_ranks + actions.ranks[receives]
        in_order, order = np.argsort(links, kind="stable"), np.lexsort((receives, links))
        for place in np.flatnonzero(receives[in_order] != receives[order])[:1].tolist():
            sender, receiver = int(sends[in_order[place]]), int(receives[order[place]])
            rank = actions.ranks[sender]
            text = f"{actions.name(receiver)} stands where rank {rank} sends {actions.name(sender)}"
            found.append(Violation("message order", text, *actions.place(receiver)))
    return found
