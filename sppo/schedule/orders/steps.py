"""Order of the forwards and backwards of one rank, and how many forwards run ahead.

Every order here obeys the two rules of causal subsequences: within one sequence, forwards run in
ascending order (a subsequence reads the K/V before it) and backwards in descending order (dK/dV of
a subsequence is complete once all later subsequences ran), while sequences stay first in, first
out.

A *step* is (virtual, unit): the virtual stage is the position of a stage on its rank, 0 if the
rank has one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from sppo.schedule.actions import Lengths, UnitKey

Step = tuple[int, UnitKey]


def forward_units(lengths: Lengths, *, sequences: Iterable[int]) -> list[UnitKey]:
    """Return the units of `sequences` in forward order."""
    return [(m, n) for m in sequences for n in range(len(lengths[m]))]


def backward_units(lengths: Lengths, *, sequences: Iterable[int]) -> list[UnitKey]:
    """Return the units of `sequences` in backward order: FIFO by sequence, LIFO within one."""
    return [(m, n) for m in sequences for n in reversed(range(len(lengths[m])))]


def sequence_groups(lengths: Lengths, *, num_ranks: int) -> list[range]:
    """Return the groups of whole sequences that pass a virtual stage together when interleaved.

    A group must hold at least `num_ranks` units; otherwise its first unit is not back from the last
    rank when the next virtual stage needs it. A group must also hold whole sequences; otherwise a
    backward would start before all forwards of its sequence have run. Sequences are spread evenly
    over the groups, larger groups first, because a short last group can starve the ranks for good.
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
    """Return the smallest groups of at least `num_ranks` units; the rest joins the last group."""
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
    """Return the forward steps of a rank: each group passes one virtual stage after another."""
    return [
        (virtual, unit)
        for group in groups
        for virtual in range(num_virtual)
        for unit in forward_units(lengths, sequences=group)
    ]


def backward_steps(lengths: Lengths, *, groups: Sequence[range], num_virtual: int) -> list[Step]:
    """Return the backward steps of a rank: each group passes the virtual stages in reverse."""
    return [
        (virtual, unit)
        for group in groups
        for virtual in reversed(range(num_virtual))
        for unit in backward_units(lengths, sequences=group)
    ]


def least_warmup(forward: Sequence[Step], *, backward: Sequence[Step]) -> int:
    """Return how many forwards must precede the first forward-backward pair on the last rank.

    The k-th backward runs after warm-up + k + 1 forwards, which must include its own forward. For N
    subsequences per sequence this is the N - 1 of Seq1F1B, and (v - 1) * G + N - 1 for v virtual
    stages and groups of G units; sequences of different N need no further rule.
    """
    position = {step: index for index, step in enumerate(forward)}
    return max(position[step] - index for index, step in enumerate(backward))


def pair_up(
    forward: Sequence[Step], *, backward: Sequence[Step], ahead: int = 0, hops: int = 0
) -> list[tuple[str, Step]]:
    """Return the order of one rank: after a warm-up, one forward and one backward in turn.

    The last rank begins each forward as late as its backwards allow. If all sequences have equally
    many subsequences, its warm-up is :func:`least_warmup` throughout; if those with most come
    first, it shrinks once these are done, and fewer units are held: a step may take a few percent
    less or more time than with a constant warm-up. Other ranks run `ahead` more forwards before
    each backward. They do not run a unit on a later virtual stage before the last rank has run it
    on the virtual stage before: that would be a deadlock.

    Args:
        forward: Forward steps of the rank.
        backward: Backward steps of the rank.
        ahead: Number of forwards that the rank runs ahead of the last rank.
        hops: Number of ranks from this one to the last.
    """
    last = _backwards_before_forwards(forward, backward=backward)
    position = {step: index for index, step in enumerate(forward)}
    order: list[tuple[str, Step]] = []
    done = 0
    for index, (virtual, unit) in enumerate(forward):
        first = last[index - ahead] if index >= ahead else 0
        if virtual > 0:
            # This rank lags behind the last one by a backward per hop.
            first = max(first, last[position[virtual - 1, unit]] - hops)
        order.extend(("B", step) for step in backward[done:first])
        done = max(done, first)
        order.append(("F", (virtual, unit)))
    order.extend(("B", step) for step in backward[done:])
    return order


def _backwards_before_forwards(forward: Sequence[Step], *, backward: Sequence[Step]) -> list[int]:
    """Return how many backwards run before each forward on the last rank.

    Before the k-th backward run k + 1 forwards, and as many more as :func:`least_warmup` requires
    for the remaining backwards.
    """
    position = {step: index for index, step in enumerate(forward)}
    begun, least = [0] * len(backward), 0
    for index in reversed(range(len(backward))):
        least = max(least, position[backward[index]] - index)
        begun[index] = min(len(forward), index + 1 + least)
    before: list[int] = []
    for index, until in enumerate(begun):
        before += [index] * (until - len(before))
    return before


def with_paced_forwards(
    order: Sequence[tuple[str, Step]], *, forwards_before_backward: Sequence[int]
) -> list[tuple[str, Step]]:
    """Return `order` with forwards moved so that a given number precedes each backward.

    Args:
        order: Order of one rank.
        forwards_before_backward: Number of forwards begun before each backward; at least all
            forwards of its own sequence and of the sequences before it.
    """
    forward = [item for item in order if item[0] == "F"]
    others = [item for item in order if item[0] != "F"]
    changed: list[tuple[str, Step]] = []
    done = index = 0
    for item in others:
        if item[0] == "B":
            until = forwards_before_backward[index]
            changed += forward[done:until]
            done, index = until, index + 1
        changed.append(item)
    return changed


def delay_weights(order: Sequence[tuple[str, Step]], *, delay: int) -> list[tuple[str, Step]]:
    """Split every backward and run its weight half `delay` backwards later (ZB-H1).

    The delayed weight gradients fill the idle time at the end of the step. Rank r of a zero-bubble
    schedule delays by r, so that every rank holds as many units as rank 0 does under 1F1B.
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
