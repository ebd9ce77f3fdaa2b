"""Order of the compute of each rank, by the name of the schedule, with every unit whole.

Every order obeys the two rules of causal subsequences: within one sequence, forwards run in
ascending order (a subsequence reads the K/V before it) and backwards in descending order (dK/dV of
a subsequence is complete once all later subsequences ran), while sequences stay first in, first
out. All ranks have the same forwards and the same backwards, each in one order.

So schedules differ in three things only: which sequences pass the virtual stages of a rank as one
group, how many backwards a rank runs before each of its forwards, and whether the weight half of a
backward is put off.

GPipe, breadth-first schedules and a single rank run all backwards of a group before the forwards of
the next. All others alternate, with more forwards in flight on each rank towards the front: one for
each rank to the last (papers/seq1f1b), two if ranks have several stages, as in Megatron-LM.

Breadth first (Lamy-Poirier, Breadth-First Pipeline Parallelism, section 4, there over
micro-batches), a group is one sequence, or as many as give every rank a unit, so K/V and their
gradients are in use on one stage of the rank at a time. The pipeline idles
(p - 1) / (v * N + p - 1) of a sequence of N subsequences, with v stages on each of p ranks.

A *step* is a unit on a virtual stage, the number virtual * units + unit. The virtual stage is the
position of a stage on its rank, 0 if the rank has one stage; units are numbered over all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sppo.quoting import quoted
from sppo.schedule.actions import Lengths, Op
from sppo.schedule.graph import Ints
from sppo.schedule.orders.names import (
    DEFERRING_WEIGHTS,
    LOOPED,
    WHOLE_SEQUENCES,
    WITH_VIRTUAL_STAGES,
    order_of,
    schedule_names,
)

ForwardsBeforeBackward = tuple[tuple[int, ...], ...]
"""Number of forwards that each rank has begun before each of its backwards, [ranks][backwards]."""


def encoded_orders(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    num_virtual: int = 1,
    forwards_before_backward: ForwardsBeforeBackward = (),
) -> tuple[Ints, Ints]:
    """Return the order of each rank's compute, with every unit whole.

    Args:
        name: Name of the schedule, one of `schedule_names()`; sppo_msp gives the order before
            units are cut.
        num_ranks: Pipeline ranks.
        lengths: Tokens of every subsequence of every sequence.
        num_virtual: Stages per rank; more than 1 only for `WITH_VIRTUAL_STAGES`.
        forwards_before_backward: Number of forwards that each rank has begun before each of its
            backwards, at least all of the backward's sequence; empty for the schedule's own
            numbers.

    Returns:
        Opcodes and steps, [ranks, actions] each.

    Raises:
        ValueError: An unknown name, or a request that the schedule cannot serve; the message says
            what to change.
    """
    cut = tuple(map(tuple, lengths))
    _check(name, cut, num_ranks=num_ranks, num_virtual=num_virtual)
    order = order_of(name, num_virtual=num_virtual)
    # A single rank has no bubble to fill, so under the schedule of the SPPO paper (its section 6)
    # it keeps the K/V of one sequence in memory instead of two.
    runs_alone = order == "sppo" and num_ranks == 1
    if order == LOOPED or order.startswith("interleaved"):
        groups = sequence_groups(cut, num_ranks=num_ranks)
    elif runs_alone:
        groups = [range(index, index + 1) for index in range(len(cut))]
    else:
        groups = [range(len(cut))]
    forward, backward, ended = _passes(cut, groups=groups, num_virtual=num_virtual)
    if forwards_before_backward:
        index = np.arange(forward.size)
        own = (np.searchsorted(begun, index, side="right") for begun in forwards_before_backward)
        before = np.stack([*own])
    elif order in ("gpipe", LOOPED) or runs_alone:
        before = np.broadcast_to(ended, (num_ranks, forward.size))
    else:
        hops = np.arange(num_ranks)[::-1, None]
        ahead = (2 if order.startswith("interleaved") else 1) * hops
        before = _alternating(forward, backward, hops=hops, ahead=ahead, num_virtual=num_virtual)
    codes = np.full((num_ranks, 2 * forward.size), Op.B)
    np.put_along_axis(codes, np.arange(forward.size) + before, Op.F, axis=1)
    steps = np.empty_like(codes)
    for code, passed in ((Op.F, forward), (Op.B, backward)):
        steps[codes == code] = np.tile(passed, num_ranks)
    if order in DEFERRING_WEIGHTS:
        return _with_weights(codes, steps, delays=np.arange(num_ranks))
    return codes, steps


def sequence_groups(lengths: Lengths, *, num_ranks: int) -> list[range]:
    """Return the groups of whole sequences that pass a virtual stage together when interleaved.

    A group must hold at least `num_ranks` units; otherwise its first unit is not back from the last
    rank when the next virtual stage needs it. A group must also hold whole sequences; otherwise a
    backward would start before all forwards of its sequence have run. Equal sequences are spread
    evenly over the groups, larger groups first, because a short last group can starve the ranks for
    good. Of unequal sequences, groups are as small as possible, and the rest joins the last group.
    """
    counts = [len(sequence) for sequence in lengths]
    if len({*counts}) == 1:
        num_groups = max(1, len(counts) // -(-num_ranks // counts[0]))
        size, larger = divmod(len(counts), num_groups)
        ends = [group * size + min(group, larger) for group in range(num_groups + 1)]
    else:
        ends, units = [0], 0
        for index, count in enumerate(counts):
            units += count
            if units >= num_ranks:
                ends.append(index + 1)
                units = 0
        ends = [*(ends[:-1] if len(ends) > 1 else ends), len(counts)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def _passes(
    lengths: Lengths, *, groups: Sequence[range], num_virtual: int
) -> tuple[Ints, Ints, Ints]:
    """Return the forwards and backwards of a rank, whose virtual stages groups pass in turn.

    Args:
        lengths: Tokens of every subsequence of every sequence.
        groups: Groups of consecutive sequences.
        num_virtual: Stages per rank.

    Returns:
        Steps in the order of their forwards: each group passes one virtual stage after another;
        steps in the order of their backwards: each group passes the virtual stages in reverse;
        first in, first out by sequence, last in, first out within one; and the number of backwards
        of all groups before that of each forward.
    """
    ends = np.cumsum([0, *map(len, lengths)])
    units = np.arange(ends[-1])
    mirrored = np.repeat(ends[:-1] + ends[1:], np.diff(ends)) - 1 - units
    begins = ends[[group.start for group in groups]]
    sizes = ends[[group.stop for group in groups]] - begins
    begin, size = np.repeat(begins, sizes), np.repeat(sizes, sizes)
    virtual = np.arange(num_virtual)[:, None]
    place = (num_virtual * begin + virtual * size + units - begin).ravel()
    back = (num_virtual * begin + virtual[::-1] * size + mirrored - begin).ravel()
    forward = np.argsort(place)
    return forward, np.argsort(back), num_virtual * begin[forward % units.size]


def _alternating(
    forward: Ints, backward: Ints, *, hops: Ints, ahead: Ints, num_virtual: int
) -> Ints:
    """Return the backwards before each forward if ranks alternate after a warm-up.

    Before the k-th backward, the last rank has begun k + 1 forwards, and as many more as that
    backward and the later ones need to follow their own forwards. For N subsequences per
    sequence these are the N - 1 of Seq1F1B, and (v - 1) * G + N - 1 for v virtual stages and
    groups of G units. If sequences with most subsequences come first, the number shrinks once
    these are done, and fewer units are held: a step may take a few percent less or more time
    than with a constant warm-up.

    Other ranks run more forwards before each backward. They do not run a unit on a later
    virtual stage before the last rank has run it on the virtual stage before: that would be a
    deadlock.

    Args:
        forward: Steps in the order of their forwards.
        backward: Steps in the order of their backwards.
        hops: Number of ranks behind each rank, [ranks, 1].
        ahead: Number of forwards that each rank runs ahead of the last one, [ranks, 1].
        num_virtual: Stages per rank.

    Returns:
        Number of backwards, [ranks, forwards].
    """
    index, place = np.arange(forward.size), np.argsort(forward)
    needed = place[backward] - index
    warmup = np.maximum.accumulate(needed[::-1])[::-1]
    begun = np.maximum.accumulate(np.minimum(index.size, index + 1 + warmup))
    last = np.searchsorted(begun, index, side="right")
    behind = index - ahead
    before: Ints = np.where(behind >= 0, last[np.maximum(behind, 0)], 0)
    num_units = forward.size // num_virtual
    later = np.flatnonzero(forward >= num_units)
    on_stage_before = place[forward[later] - num_units]
    # A rank lags behind the last one by a backward per hop.
    before[:, later] = np.maximum(before[:, later], last[on_stage_before] - hops)
    return np.maximum.accumulate(before, axis=1)


def _with_weights(codes: Ints, steps: Ints, *, delays: Ints) -> tuple[Ints, Ints]:
    """Split every backward and run its weight half some backwards later (ZB-H1).

    The delayed weight gradients fill the idle time at the end of the step. Rank r of a zero-bubble
    schedule delays by r, so that every rank holds as many units as rank 0 does under 1F1B.

    Args:
        codes: Opcodes of every rank in order, [ranks, 2 * steps].
        steps: Steps of every rank in order.
        delays: Number of backwards between a backward and its weight half, of each rank.
    """
    ranks, actions = codes.shape
    is_backward = codes == Op.B
    halves = np.maximum(0, np.cumsum(is_backward, axis=1) - is_backward - delays[:, None])
    at = np.arange(actions) + halves
    split = np.full((ranks, actions + actions // 2), Op.W)
    np.put_along_axis(split, at, codes, axis=1)
    order = np.empty_like(split)
    np.put_along_axis(order, at, steps, axis=1)
    order[split == Op.W] = steps[is_backward]
    return split, order


def _check(name: str, lengths: Lengths, *, num_ranks: int, num_virtual: int) -> None:
    """Raise ValueError if the schedule `name` cannot serve a request."""
    if name not in schedule_names():
        raise ValueError(
            f"schedule {quoted(name)} is not known: choose one of {', '.join(schedule_names())}"
        )
    if min(num_ranks, num_virtual) < 1:
        raise ValueError(
            f"{num_ranks} ranks with {num_virtual} stages each: both must be at least 1"
        )
    if num_virtual > 1 and name not in WITH_VIRTUAL_STAGES:
        raise ValueError(
            f"schedule {quoted(name)} holds one stage per rank, got num_virtual {num_virtual}: "
            f"use one of {', '.join(WITH_VIRTUAL_STAGES)}, or set num_virtual to 1"
        )
    if not lengths:
        raise ValueError("lengths is empty: a schedule needs at least one sequence")
    for sequence, parts in enumerate(lengths):
        if not parts or min(parts) < 1:
            raise ValueError(
                f"sequence {sequence} has lengths {list(parts)}: it needs at least one "
                "subsequence, each of at least one token"
            )
        if name in WHOLE_SEQUENCES and len(parts) > 1:
            raise ValueError(
                f"schedule {quoted(name)} runs whole sequences, but sequence {sequence} is cut "
                f"into {len(parts)} subsequences: use {WHOLE_SEQUENCES[name]}, or 1 subsequence"
            )
