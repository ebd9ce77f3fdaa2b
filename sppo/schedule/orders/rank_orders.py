"""Order of the compute of each rank, by the name of the schedule, with every unit whole.

Schedules differ in three things: which sequences pass the virtual stages of a rank as one group,
how many backwards a rank runs before each of its forwards, and whether the weight half of a
backward is put off.

GPipe, breadth-first schedules and a single rank run all backwards of a group before the forwards of
the next. All others alternate, with more forwards in flight on each rank towards the front: one for
each rank to the last (papers/seq1f1b), two if ranks have several stages, as in Megatron-LM.

Breadth first (Lamy-Poirier, Breadth-First Pipeline Parallelism, section 4, there over
micro-batches), a group is one sequence, or as many as give every rank a unit, so K/V and their
gradients are in use on one stage of the rank at a time. The pipeline idles
(p - 1) / (v * N + p - 1) of a sequence of N subsequences, with v stages on each of p ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sppo.quoting import quoted
from sppo.schedule.actions import Lengths
from sppo.schedule.encoding import Codes, F
from sppo.schedule.orders.names import (
    DEFERRING_WEIGHTS,
    LOOPED,
    WHOLE_SEQUENCES,
    WITH_VIRTUAL_STAGES,
    order_of,
    schedule_names,
)
from sppo.schedule.orders.steps import Indices, Passes, merged, sequence_groups, with_weights

ForwardsBeforeBackward = tuple[tuple[int, ...], ...]
"""Number of forwards that each rank has begun before each of its backwards, [ranks][backwards]."""


def encoded_orders(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    num_virtual: int = 1,
    forward_only: bool = False,
    forwards_before_backward: ForwardsBeforeBackward = (),
) -> tuple[Codes, Indices]:
    """Return the order of each rank's compute, with every unit whole.

    Args:
        name: Name of the schedule, one of `schedule_names()`; sppo_msp gives the order before
            units are cut.
        num_ranks: Pipeline ranks.
        lengths: Tokens of every subsequence of every sequence.
        num_virtual: Stages per rank; more than 1 only for `WITH_VIRTUAL_STAGES`.
        forward_only: Leave out backwards.
        forwards_before_backward: Number of forwards that each rank has begun before each of its
            backwards, at least all of the backward's sequence; empty for the schedule's own
            numbers.

    Returns:
        Opcodes and steps (:mod:`sppo.schedule.orders.steps`), [ranks, actions] each.

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
    passes = Passes.of_groups(cut, groups=groups, num_virtual=num_virtual)
    if forward_only:
        forwards = np.broadcast_to(passes.forward, (num_ranks, passes.forward.size))
        return np.full(forwards.shape, F, dtype=np.int32), forwards
    if forwards_before_backward:
        before = _paced(forwards_before_backward, count=passes.forward.size)
    elif order in ("gpipe", LOOPED) or runs_alone:
        before = np.broadcast_to(passes.ended, (num_ranks, passes.forward.size))
    else:
        ahead = 2 if order.startswith("interleaved") else 1
        before = passes.alternating(num_ranks, ahead_per_hop=ahead)
    codes, steps = merged(passes, before)
    if order in DEFERRING_WEIGHTS:
        return with_weights(codes, steps, delays=np.arange(num_ranks))
    return codes, steps


def _paced(forwards_before_backward: ForwardsBeforeBackward, *, count: int) -> Indices:
    """Return the number of backwards before each forward, [ranks, forwards]."""
    paced = np.array(forwards_before_backward)
    return np.stack([np.searchsorted(own, np.arange(count), side="right") for own in paced])


def _check(name: str, lengths: Lengths, *, num_ranks: int, num_virtual: int) -> None:
    """Raise ValueError if the schedule `name` cannot serve a request."""
    if name not in schedule_names():
        raise ValueError(
            f"schedule {quoted(name)} is not known: choose one of {', '.join(schedule_names())}"
        )
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}: a pipeline has at least 1 rank")
    if num_virtual < 1:
        raise ValueError(f"num_virtual is {num_virtual}: a rank holds at least 1 stage")
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
