"""Order of the compute of each rank, by the name of the schedule, with every unit whole.

Schedules differ in three things: which sequences pass the virtual stages of a rank as one group,
how many backwards a rank runs before each of its forwards, and whether the weight half of a
backward is put off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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


@dataclass(frozen=True, slots=True)
class _Request:
    """Request for the orders of all ranks."""

    num_ranks: int
    num_virtual: int
    lengths: Lengths
    forwards_before_backward: ForwardsBeforeBackward


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
            backwards; empty for the schedule's own numbers.

    Returns:
        Opcodes and steps (:mod:`sppo.schedule.orders.steps`), [ranks, actions] each.

    Raises:
        ValueError: An unknown name, or a request that the schedule cannot serve; the message says
            what to change.
    """
    cut = tuple(map(tuple, lengths))
    request = _checked(name, _Request(num_ranks, num_virtual, cut, forwards_before_backward))
    order = order_of(name, num_virtual=num_virtual)
    passes = Passes.of_groups(cut, groups=_groups(order, request), num_virtual=num_virtual)
    if forward_only:
        forwards = np.broadcast_to(passes.forward, (num_ranks, passes.forward.size))
        return np.full(forwards.shape, F, dtype=np.int32), forwards
    codes, steps = merged(passes, _backwards_before_forwards(order, request, passes))
    if order in DEFERRING_WEIGHTS:
        return with_weights(codes, steps, delays=np.arange(num_ranks))
    return codes, steps


def _groups(name: str, request: _Request) -> list[range]:
    """Return the groups of sequences that pass the virtual stages of a rank together.

    Breadth first (Lamy-Poirier, Breadth-First Pipeline Parallelism, section 4, there over
    micro-batches), a group is one sequence, or as many as give every rank a unit, so K/V and their
    gradients are in use on one stage of the rank at a time. The pipeline idles
    (p - 1) / (v * N + p - 1) of a sequence of N subsequences, with v stages on each of p ranks.
    """
    count = len(request.lengths)
    if name == LOOPED or name.startswith("interleaved"):
        return sequence_groups(request.lengths, num_ranks=request.num_ranks)
    if _runs_sequences_alone(name, request):
        return [range(index, index + 1) for index in range(count)]
    return [range(count)]


def _runs_sequences_alone(name: str, request: _Request) -> bool:
    """Return whether a rank ends a sequence before it begins the next.

    A single rank has no bubble to fill, so under the schedule of the SPPO paper (its section 6) it
    keeps the K/V of one sequence in memory instead of two.
    """
    return name == "sppo" and request.num_ranks == 1


def _backwards_before_forwards(name: str, request: _Request, passes: Passes) -> Indices:
    """Return the number of backwards that each rank runs before each forward, [ranks, forwards].

    GPipe, breadth-first schedules and a single rank run all backwards of a group before the
    forwards of the next. All others alternate, with more forwards in flight on each rank towards
    the front: one for each rank to the last (papers/seq1f1b), two if ranks have several stages, as
    in Megatron-LM.
    """
    ranks, count = request.num_ranks, passes.forward.size
    if request.forwards_before_backward:
        paced = np.array(request.forwards_before_backward)
        return np.stack([np.searchsorted(own, np.arange(count), side="right") for own in paced])
    if name in ("gpipe", LOOPED) or _runs_sequences_alone(name, request):
        return np.broadcast_to(passes.ended, (ranks, count))
    return passes.alternating(ranks, ahead_per_hop=2 if name.startswith("interleaved") else 1)


def _checked(name: str, request: _Request) -> _Request:
    """Return `request`, or raise ValueError if the schedule `name` cannot serve it."""
    if name not in schedule_names():
        raise ValueError(
            f"schedule {quoted(name)} is not known: choose one of {', '.join(schedule_names())}"
        )
    if request.num_ranks < 1:
        raise ValueError(f"num_ranks is {request.num_ranks}: a pipeline has at least 1 rank")
    if request.num_virtual < 1:
        raise ValueError(f"num_virtual is {request.num_virtual}: a rank holds at least 1 stage")
    if request.num_virtual > 1 and name not in WITH_VIRTUAL_STAGES:
        raise ValueError(
            f"schedule {quoted(name)} holds one stage per rank, got num_virtual "
            f"{request.num_virtual}: use one of {', '.join(WITH_VIRTUAL_STAGES)}, or set "
            "num_virtual to 1"
        )
    _check_lengths(name, request.lengths)
    _check_forwards_before_backward(name, request)
    return request


def _check_forwards_before_backward(name: str, request: _Request) -> None:
    """Refuse too few forwards before a backward, and pacing of ranks with several stages."""
    if not request.forwards_before_backward:
        return
    if request.num_virtual > 1 or name == "sppo_msp":
        raise ValueError(
            "forwards_before_backward changes the order of ranks that run the units of one stage "
            f"whole, not that of {quoted(name)} with {request.num_virtual} stages on a rank: leave "
            "it out"
        )
    ends = list(accumulate(map(len, request.lengths)))
    least = [end for end, own in zip(ends, request.lengths, strict=True) for _ in own]
    for rank, counts in enumerate(request.forwards_before_backward):
        ascends = all(one <= other for one, other in pairwise((0, *counts, ends[-1])))
        enough = len(counts) == len(least) and all(
            a <= b for a, b in zip(least, counts, strict=True)
        )
        if not ascends or not enough:
            raise ValueError(
                f"forwards_before_backward of rank {rank} is {list(counts)}: it must ascend, one "
                f"for each of {len(least)} backwards, from {least} up to {ends[-1]}"
            )


def _check_lengths(name: str, lengths: Lengths) -> None:
    """Refuse empty sequences, empty subsequences and cuts that the schedule does not support."""
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
