"""Validation of schedules, without any timing.

Rules, each with the failure that it prevents:

* coverage: every F once per stage and unit, every B once from the first stage with any B on, W, D2H
  and H2D at most once. A duplicate would add its gradients twice. No copy without its counterpart,
  nor on a stage without a backward; K and V of a sequence leave a stage for all units, or none.
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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sppo.quoting import quoted
from sppo.schedule.actions import RESIDENT_STAGES, Op
from sppo.schedule.costs import abstract_costs
from sppo.schedule.graph import Edges, Flags, Ints, longest_paths
from sppo.schedule.schedule import Schedule, columns_of
from sppo.schedule.simulation.simulate import DeadlockError, simulate

_SHOWN = 5
_SHOWN_OF_RULE = 8
_MESSAGES = (Op.SEND_ACT, Op.SEND_GRAD, Op.RECV_ACT, Op.RECV_GRAD)
_COMPLETE: dict[int, str] = {**dict.fromkeys(_MESSAGES, "message coverage"), Op.REDUCE: "reduction"}
"""Rules of completeness of kinds of actions other than compute and copies."""
_MISPLACED: dict[int, str] = {
    **dict.fromkeys(_MESSAGES, "carries nothing that crosses ranks here"),
    **dict.fromkeys((Op.KV, Op.D2H_KV, Op.H2D_KV), "moves K and V that stay, or move already"),
    Op.F: "is on a rank that does not hold its stage",
    Op.REDUCE: "runs on a rank that does not hold its stage, or reduces nothing",
}
"""What is wrong with an action that is not needed where it is."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Violation of one rule.

    Attributes:
        rule: Name of the rule, as listed in `validate`.
        text: Offending action and what is wrong with it.
        rank: Rank of the offending program; None if an action is missing everywhere.
        index: Position of the action in that program, from 0.
    """

    rule: str
    text: str
    rank: int | None = None
    index: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}, "
        if self.index is not None:
            where += f"action {self.index + 1}: "
        return f"{where}{self.text} (rule: {self.rule})"


class ScheduleError(RuntimeError):
    """Error of a schedule that breaks rules; the message lists the first violations.

    No request causes it, but a bug of what made the programs.
    """

    def __init__(self, name: str, *, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        shown = "\n".join(f"  {violation}" for violation in self.violations[:_SHOWN])
        hidden = len(self.violations) - _SHOWN
        more = f"\n  and {hidden} more" if hidden > 0 else ""
        super().__init__(f"schedule {quoted(name)} is not valid:\n{shown}{more}")


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
        simulate(schedule, costs=costs)
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
    # What happens at once waits as one action, the first of it, for all that precedes any of it.
    firsts = np.arange(schedule.never + 1)
    shards, first_shards = schedule.first_shards()
    firsts[shards] = first_shards
    for send, receive, step in ((Op.SEND_ACT, Op.RECV_ACT, 1), (Op.SEND_GRAD, Op.RECV_GRAD, -1)):
        received = schedule.of(receive)
        senders = schedule.slots[received] - step * schedule.num_units
        firsts[received] = schedule.at(send, senders, schedule.shards[received])
    queued = schedule.of(
        Op.F, Op.B, Op.W, Op.KV, Op.SEND_ACT, Op.SEND_GRAD, Op.RECV_ACT, Op.RECV_GRAD
    )
    follows = np.flatnonzero(np.diff(schedule.ranks[queued]) == 0)
    joined = np.flatnonzero(firsts != np.arange(firsts.size))
    edges = Edges.joined(
        [
            Edges.of(queued[follows], firsts[queued[follows + 1]]),
            Edges.of(firsts[joined], joined),
        ]
    )
    ends = longest_paths(
        edges,
        seconds=np.zeros(firsts.size),
        ranks=schedule.ranks,
        turns=np.arange(firsts.size),
    )
    stuck = np.flatnonzero(np.isinf(ends[: schedule.never]))
    if stuck.size:
        raise DeadlockError("messages wait for each other with one queue per rank", schedule, stuck)


def _broken_rules(schedule: Schedule) -> list[Violation]:
    """Return the violations of all rules except "no deadlock"."""
    return (
        [*_group_problems(schedule)]
        or [*_coverage_problems(schedule)]
        or [*_order_problems(schedule), *_weight_problems(schedule), *_gradient_problems(schedule)]
        or [*_message_problems(schedule)]
    )


def _violations(schedule: Schedule, rule: str, actions: Ints, problem: str) -> Iterator[Violation]:
    """Yield the violations of a rule by actions, each with the same problem."""
    for action in actions[:_SHOWN_OF_RULE].tolist():
        yield Violation(rule, f"{schedule.text(action)} {problem}", *schedule.place(action))


def _group_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield the violations of units that ranks share: their shards, ranks and tokens."""
    for cut in schedule.cuts:
        name = f"cut of {cut.stage}F{cut.sequence}.{cut.subsequence} into {list(cut.lengths)}"
        tokens = schedule.lengths[cut.sequence][cut.subsequence]
        if sum(cut.lengths) != tokens or min(cut.lengths, default=0) < 1:
            text = f"{name}: must be positive and add up to {tokens} tokens"
            yield Violation("coverage", text)
    forwards = schedule.of(Op.F)
    for slot, group in schedule.msp_groups.items():
        shards = forwards[schedule.slots[forwards] == slot]
        first, width, rank = int(shards[0]), len(group.ranks), int(schedule.ranks[shards[0]])
        name = schedule.text(first).partition("[")[0]
        owner = schedule.placement.rank_of(slot // schedule.num_units)
        if sorted(schedule.shards[shards].tolist()) != [*range(width)]:
            text = f"is cut, and {shards.size} of {width} shards are there"
            yield Violation("coverage", f"{name} {text}", *schedule.place(first))
        elif len({*group.ranks}) < width:
            yield Violation("placement", f"{name}: two shards of it are on one rank", rank)
        elif owner not in group.ranks:
            text = f"no shard of it runs on rank {owner}, which has the weights"
            yield Violation("placement", f"{name}: {text}", rank)
        elif len(group.lengths) != width or min(group.lengths) < 1:
            text = f"runs in {width} shards, but its tokens are cut into {[*group.lengths]}"
            yield Violation("coverage", f"{name} {text}", rank)


def _coverage_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield the violations of actions that are missing, duplicate or not needed where they are.

    What is needed and not there is missing, what is there and not needed is misplaced, and nothing
    may be there twice.
    """
    actions = np.flatnonzero(schedule.columns[1] <= Op.REDUCE)
    there, needed = schedule.columns[:, actions], _needed(schedule)
    limits = 1 + np.hstack([there, needed]).max(axis=1, initial=0)
    have, want = (np.ravel_multi_index(tuple(rows), tuple(limits)) for rows in (there, needed))
    missing = needed[:, np.flatnonzero(~np.isin(want, have))[:_SHOWN_OF_RULE]]
    for action, rank, code in zip(schedule.named(missing), *missing[:2].tolist(), strict=True):
        yield Violation(_COMPLETE.get(code, "coverage"), f"{action} is missing", rank)
    _, first, inverse = np.unique(have, return_index=True, return_inverse=True)
    for action in actions[first[inverse] != np.arange(have.size)][:_SHOWN_OF_RULE]:
        rule = _COMPLETE.get(int(schedule.codes[action]), "coverage")
        yield from _violations(schedule, rule, action[None], "is there more than once")
    for action in actions[~np.isin(have, want)][:_SHOWN_OF_RULE]:
        code = int(schedule.codes[action])
        rule = _COMPLETE.get(code, "placement")
        problem = _MISPLACED.get(code, "is on a rank without the F of the same unit and shard")
        yield from _violations(schedule, rule, action[None], problem)


def _needed(schedule: Schedule) -> Ints:
    """Return the actions that a step needs as columns, [5, actions].

    They follow from its units, the ranks that share them, and the optional actions that are there:
    a copy needs its counterpart, and K and V of a sequence leave a stage for all units or none. K
    and V of a unit that is cut stay, and those that are copied are not recomputed.
    Copies of weights and gradients, of which a step may need several, are left out.
    """
    num_ranks, all_slots = schedule.num_ranks, np.arange(schedule.size)

    def there(*codes: int) -> Flags:
        return np.isin(all_slots, schedule.slots[schedule.of(*codes)])

    def of_sequences(some: Flags) -> Flags:
        table = some.reshape(schedule.num_stages, schedule.num_units)
        any_unit = np.logical_or.reduceat(table, schedule.unit_offsets, axis=1)
        return any_unit.repeat([*map(len, schedule.lengths)], axis=1).ravel()

    whole = np.setdiff1d(all_slots, [*schedule.msp_groups])
    backward = all_slots >= schedule.forward_only_stages * schedule.num_units
    may_leave = backward & np.isin(all_slots, whole)
    copied = of_sequences(there(Op.D2H_KV, Op.H2D_KV)) & may_leave
    required = {
        Op.F: np.ones(schedule.size, dtype=bool),
        Op.B: backward,
        Op.W: there(Op.W) & backward,
        Op.KV: of_sequences(there(Op.KV)) & may_leave & ~copied,
        **dict.fromkeys((Op.D2H, Op.H2D), there(Op.D2H, Op.H2D) & backward),
        **dict.fromkeys((Op.D2H_KV, Op.H2D_KV), copied),
    }
    shards = [
        (rank, Op.F, slot, shard, len(group.ranks))
        for slot, group in schedule.msp_groups.items()
        for shard, rank in enumerate(group.ranks)
    ]
    forwards = np.hstack(
        [
            columns_of(whole // schedule.num_units % num_ranks, Op.F, whole),
            np.array(shards, dtype=np.int64).reshape(-1, 5).T,
        ]
    )
    parts = []
    for code, slots in required.items():
        parts.append(forwards[:, slots[forwards[2]]])
        parts[-1][1] = code
    if schedule.of(*_MESSAGES).size:
        for sends, receives, _, _ in schedule.messages.values():
            parts += sends, receives
    reduced = np.unique(schedule.slots[schedule.of(Op.REDUCE)])
    reduced = reduced[reduced >= schedule.forward_only_stages]
    return np.hstack([*parts, columns_of(reduced % num_ranks, Op.REDUCE, reduced)])


def _order_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield the violations of actions that stand before what they need on their rank."""
    units = schedule.ranks * schedule.size + schedule.slots
    stages = schedule.ranks * schedule.num_stages + schedule.stages
    sequences = units - schedule.before
    forward, backward = schedule.of(Op.F), schedule.of(Op.B)
    continued = backward[schedule.behind[backward] > 0]
    begun = backward[schedule.behind[backward] == 0]
    # Rule, actions, group of what each of them needs, and what it needs, by its own group.
    for rule, later, needed, earlier, own in (
        ("forward order", forward[schedule.before[forward] > 0], units - 1, (Op.F,), units),
        ("backward order", continued, units + 1, (Op.B,), units),
        ("backward order", backward, units, (Op.F,), units),
        ("weight order", schedule.of(Op.W), units, (Op.B,), units),
        ("copy order", schedule.of(Op.D2H, Op.D2H_KV, Op.KV), units, (Op.F,), units),
        ("copy order", schedule.of(Op.H2D), units, (Op.D2H,), units),
        ("copy order", backward, units, (Op.H2D,), units),
        ("copy order", schedule.of(Op.H2D_KV), units, (Op.D2H_KV,), units),
        ("message place", schedule.of(Op.SEND_ACT), units, (Op.F,), units),
        ("message place", schedule.of(Op.SEND_GRAD), units, (Op.B,), units),
        ("message place", forward, units, (Op.RECV_ACT,), units),
        ("message place", backward, units, (Op.RECV_GRAD,), units),
        ("copy order", begun, sequences, (Op.H2D_KV, Op.KV), sequences),
        ("reduction", schedule.of(Op.REDUCE), stages, (Op.B, Op.W), stages),
    ):
        others, is_behind = schedule.nearest(
            later, schedule.of(*earlier), of=needed, among=own, behind=True
        )
        for action, other in zip(
            later[is_behind][:_SHOWN_OF_RULE], others[is_behind], strict=False
        ):
            problem = f"stands before {schedule.text(int(other))}, which it needs"
            yield from _violations(schedule, rule, action[None], problem)


def _weight_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield compute that reads weights of another stage than the last `RESIDENT_STAGES` fetched."""
    fetched = schedule.of(Op.H2D_WEIGHTS)
    streaming = np.isin(schedule.ranks, schedule.ranks[fetched])
    reading = np.flatnonzero(streaming & np.isin(schedule.codes, (Op.F, Op.B, Op.KV)))
    held = np.zeros(reading.shape, dtype=bool)
    places = np.searchsorted(fetched, reading)
    for ago in range(1, RESIDENT_STAGES + 1):
        there = fetched[np.maximum(0, places - ago)]
        same = (schedule.ranks[there] == schedule.ranks[reading]) & (places >= ago)
        held |= same & (schedule.stages[there] == schedule.stages[reading])
    problem = "reads weights of a stage that are not here"
    yield from _violations(schedule, "state order", reading[~held], problem)


def _gradient_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield additions to gradients that are not on the device, and gradients that do not leave."""
    leaving, back = schedule.of(Op.D2H_GRADIENTS), schedule.of(Op.H2D_GRADIENTS)
    streaming = np.isin(schedule.ranks, schedule.ranks[np.append(leaving, back)])
    adds = np.isin(schedule.codes, (Op.B, Op.W))
    adds |= (schedule.codes == Op.F) & (schedule.stages == schedule.num_stages - 1)
    adding = np.flatnonzero(streaming & adds)
    reducing = np.flatnonzero(streaming & (schedule.codes == Op.REDUCE))
    stages = schedule.ranks * schedule.num_stages + schedule.stages
    present = np.sort(np.concatenate([adding, leaving, back]))

    def have_left(some: Ints) -> Flags:
        last, is_there = schedule.nearest(some, present, of=stages)
        is_there &= schedule.codes[last] == Op.D2H_GRADIENTS
        return is_there

    _, is_followed = schedule.nearest(present, present, of=stages, behind=True)
    ends = present[~is_followed]
    _, is_made = schedule.nearest(leaving, present, of=stages)
    for wrong, problem in (
        (adding[have_left(adding)], "adds to gradients that have left"),
        (reducing[have_left(reducing)], "reduces gradients that have left"),
        (back[~have_left(back)], "brings back gradients that have not left"),
        (leaving[have_left(leaving) | ~is_made], "takes gradients away that are not here"),
        (ends[schedule.codes[ends] != Op.D2H_GRADIENTS], "leaves gradients that do not leave"),
    ):
        yield from _violations(schedule, "state order", wrong, problem)


def _message_problems(schedule: Schedule) -> Iterator[Violation]:
    """Yield the first message of a wire that is received in another order than it is sent."""
    for send, receive, step in ((Op.SEND_ACT, Op.RECV_ACT, 1), (Op.SEND_GRAD, Op.RECV_GRAD, -1)):
        sends = schedule.of(send)
        consumers = schedule.slots[sends] + step * schedule.num_units
        receives = schedule.at(receive, consumers, schedule.shards[sends])
        links = schedule.ranks[sends] * schedule.num_ranks + schedule.ranks[receives]
        in_order, order = np.argsort(links, kind="stable"), np.lexsort((receives, links))
        for place in np.flatnonzero(receives[in_order] != receives[order])[:1].tolist():
            sender = int(sends[in_order[place]])
            problem = f"stands where rank {schedule.ranks[sender]} sends {schedule.text(sender)}"
            yield from _violations(schedule, "message order", receives[order[[place]]], problem)
