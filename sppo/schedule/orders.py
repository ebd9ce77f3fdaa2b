"""The order of work on one rank: which unit next, forward or backward, and how far ahead.

Every order here obeys the two rules of causal subsequences: inside one sequence forwards run in
ascending order (a subsequence reads the K/V before it) and backwards in descending order (its
dK/dV is complete once all later ones ran), while sequences stay first in, first out.

A *step* is (virtual, unit): the virtual stage is the position of a stage on its rank, 0 where a
rank has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from sppo.schedule.actions import Action, ActionKind

UnitKey = tuple[int, int]
"""(sequence, subsequence)."""
Step = tuple[int, UnitKey]
Lengths = tuple[tuple[int, ...], ...]


def forward_units(lengths: Lengths, *, sequences: Iterable[int]) -> list[UnitKey]:
    """Units of `sequences` in forward order."""
    return [(m, n) for m in sequences for n in range(len(lengths[m]))]


def backward_units(lengths: Lengths, *, sequences: Iterable[int]) -> list[UnitKey]:
    """Units of `sequences` in backward order: first in, first out; last in, first out inside."""
    return [(m, n) for m in sequences for n in reversed(range(len(lengths[m])))]


def sequence_groups(lengths: Lengths, *, num_ranks: int) -> list[range]:
    """Whole sequences that pass a virtual stage together in an interleaved schedule.

    A group must hold at least `num_ranks` units, or its first unit is not back from the last rank
    when the next virtual stage wants it; and it must hold whole sequences, or a backward would
    start before its sequence is through. Sequences are spread evenly over the groups, larger groups
    first, because a short last group can starve the ranks for good.
    """
    counts = [len(sequence) for sequence in lengths]
    if len({*counts}) > 1:
        return _groups_of_unequal(counts, num_ranks=num_ranks)
    smallest = counts[0]
    per_group = -(-num_ranks // smallest)
    num_groups = max(1, len(lengths) // per_group)
    size, larger = divmod(len(lengths), num_groups)
    groups, begin = [], 0
    for group in range(num_groups):
        end = begin + size + (group < larger)
        groups.append(range(begin, end))
        begin = end
    return groups


def _groups_of_unequal(counts: Sequence[int], *, num_ranks: int) -> list[range]:
    """Groups of as few sequences as have `num_ranks` units; what is left joins the last one."""
    ends, units = [0], 0
    for index, count in enumerate(counts):
        units += count
        if units >= num_ranks:
            ends.append(index + 1)
            units = 0
    if units and len(ends) > 1:
        ends.pop()
    if ends[-1] < len(counts):
        ends.append(len(counts))
    return [range(begin, end) for begin, end in pairwise(ends)]


def forward_steps(lengths: Lengths, *, groups: Sequence[range], num_virtual: int) -> list[Step]:
    """Forward steps of a rank: each group passes one virtual stage after another."""
    return [
        (virtual, unit)
        for group in groups
        for virtual in range(num_virtual)
        for unit in forward_units(lengths, sequences=group)
    ]


def backward_steps(lengths: Lengths, *, groups: Sequence[range], num_virtual: int) -> list[Step]:
    """Backward steps of a rank: each group passes the virtual stages in reverse."""
    return [
        (virtual, unit)
        for group in groups
        for virtual in reversed(range(num_virtual))
        for unit in backward_units(lengths, sequences=group)
    ]


def least_warmup(forward: Sequence[Step], *, backward: Sequence[Step]) -> int:
    """Forwards that must precede the first forward-backward pair on the last rank.

    The k-th backward runs after warm-up + k + 1 forwards and its own forward must be among them.
    For N subsequences per sequence this is the N - 1 of Seq1F1B, and (v - 1) * G + N - 1 for v
    virtual stages and groups of G units; sequences of different N need no further rule.
    """
    position = {step: index for index, step in enumerate(forward)}
    return max(position[step] - index for index, step in enumerate(backward))


def pair_up(
    forward: Sequence[Step], *, backward: Sequence[Step], warmup: int
) -> list[tuple[str, Step]]:
    """One forward, one backward after `warmup` forwards; then the remaining backwards."""
    warmup = min(warmup, len(forward))
    order = [("F", step) for step in forward[:warmup]]
    for index, step in enumerate(forward[warmup:]):
        order.append(("F", step))
        order.append(("B", backward[index]))
    order.extend(("B", step) for step in backward[len(forward) - warmup :])
    return order


def pair_up_ahead(
    forward: Sequence[Step], *, backward: Sequence[Step], ahead: int
) -> list[tuple[str, Step]]:
    """One forward, one backward after a warm-up that shrinks when the sequences that need it end.

    Before each backward run as many forwards as :func:`least_warmup` asks for on behalf of the
    backwards that are left, and `ahead` more. Where sequences have unequal numbers of
    subsequences, those with most first, fewer units are held once these are done. Where they have
    equal numbers this is :func:`pair_up`.
    """
    position = {step: index for index, step in enumerate(forward)}
    needed, least = [0] * len(backward), 0
    for index in reversed(range(len(backward))):
        least = max(least, position[backward[index]] - index)
        needed[index] = least
    order: list[tuple[str, Step]] = []
    done = 0
    for index, step in enumerate(backward):
        until = min(len(forward), index + 1 + needed[index] + ahead)
        order.extend(("F", other) for other in forward[done:until])
        done = max(done, until)
        order.append(("B", step))
    return order


def with_begun(
    order: Sequence[tuple[str, Step]], *, begun: Sequence[int]
) -> list[tuple[str, Step]]:
    """An order with as many forwards before each backward, in all, as are to have begun by then.

    Args:
        order: of a rank.
        begun: of each backward; never fewer than those of its own sequence and of those before it.
    """
    forward = [item for item in order if item[0] == "F"]
    others = [item for item in order if item[0] != "F"]
    changed: list[tuple[str, Step]] = []
    done = index = 0
    for item in others:
        if item[0] == "B":
            changed += forward[done : begun[index]]
            done, index = begun[index], index + 1
        changed.append(item)
    return changed


def delay_weights(order: Sequence[tuple[str, Step]], *, delay: int) -> list[tuple[str, Step]]:
    """Split every backward and run its weight half `delay` backwards later (ZB-H1).

    The weight gradients held back fill the idle time at the end, where there is nothing else to
    do. Rank r of a zero-bubble schedule delays by r, so that every rank holds as many units as
    rank 0 does under 1F1B.
    """
    split: list[tuple[str, Step]] = []
    held: list[Step] = []
    for kind, step in order:
        split.append((kind, step))
        if kind == "B":
            held.append(step)
            if len(held) > delay:
                split.append(("W", held.pop(0)))
    split.extend(("W", step) for step in held)
    return split


def with_reductions(actions: Sequence[Action], *, stages: Sequence[int]) -> list[Action]:
    """Return `actions` of one rank with a REDUCE for each stage it owns.

    It stands behind the stage's last B or W; of the stage that ends last at the end of the program,
    behind shards of other ranks' stages: the rank waits there for all that is being reduced.
    """
    backward = (ActionKind.B, ActionKind.W)
    last = {a.stage: n for n, a in enumerate(actions) if a.kind in backward and a.stage in stages}
    if last:
        last[max(last, key=last.__getitem__)] = len(actions) - 1
    ended = {index: stage for stage, index in last.items()}
    placed: list[Action] = []
    for index, action in enumerate(actions):
        placed.append(action)
        if index in ended:
            placed.append(Action(ActionKind.REDUCE, ended[index]))
    return placed
