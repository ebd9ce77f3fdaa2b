"""Order of the compute of each rank, by the name of the schedule, with every unit whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from sppo.quoting import quoted
from sppo.schedule.actions import Lengths
from sppo.schedule.orders import steps
from sppo.schedule.orders.names import (
    WHOLE_SEQUENCES,
    WITH_VIRTUAL_STAGES,
    order_of,
    schedule_names,
)
from sppo.schedule.orders.steps import Step

RankOrder = list[tuple[str, Step]]
ForwardsBeforeBackward = tuple[tuple[int, ...], ...]
"""Number of forwards that each rank has begun before each of its backwards, [ranks][backwards]."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Validated request for the orders of all ranks."""

    num_ranks: int
    num_virtual: int
    lengths: Lengths
    warmup_per_hop: int
    forward_only: bool
    forwards_before_backward: ForwardsBeforeBackward

    @property
    def everything(self) -> range:
        """Indices of all sequences, as one group."""
        return range(len(self.lengths))


def rank_orders(
    name: str,
    *,
    num_ranks: int,
    lengths: Sequence[Sequence[int]],
    num_virtual: int = 1,
    warmup_per_hop: int = 1,
    forward_only: bool = False,
    forwards_before_backward: ForwardsBeforeBackward = (),
) -> Iterator[RankOrder]:
    """Return the order of each rank's compute, with every unit whole.

    Args:
        name: Name of the schedule, one of `schedule_names()`; sppo_msp gives the order before
            units are cut.
        num_ranks: Pipeline ranks.
        lengths: Tokens of every subsequence of every sequence.
        num_virtual: Stages per rank; more than 1 only for `WITH_VIRTUAL_STAGES`.
        warmup_per_hop: Extra warm-up forwards per rank towards the front, see
            `generate`.
        forward_only: Leave out backwards.
        forwards_before_backward: Number of forwards that each rank has begun before each of its
            backwards; empty for the schedule's own numbers.

    Raises:
        ValueError: An unknown name, or a request that the schedule cannot serve; the message says
            what to change.
    """
    request = _checked(
        name,
        _Request(
            num_ranks,
            num_virtual,
            tuple(map(tuple, lengths)),
            warmup_per_hop,
            forward_only,
            forwards_before_backward,
        ),
    )
    order = order_of(name, num_virtual=num_virtual)
    return (_rank_order(order, request, rank) for rank in range(num_ranks))


def _rank_order(name: str, request: _Request, rank: int) -> RankOrder:
    """Return the order of a rank's compute, paced and without backwards as the request asks."""
    order = _ORDERS[name](request, rank)
    if request.forward_only:
        return [item for item in order if item[0] == "F"]
    if not request.forwards_before_backward:
        return order
    return steps.with_paced_forwards(
        order, forwards_before_backward=request.forwards_before_backward[rank]
    )


def _gpipe(request: _Request, rank: int) -> RankOrder:
    forward, backward, _ = _one_stage(request.lengths)
    return [*(("F", step) for step in forward), *(("B", step) for step in backward)]


def _seq1f1b(request: _Request, rank: int) -> RankOrder:
    """Return the Seq1F1B order, with more forwards in flight on each rank towards the front.

    Source: papers/seq1f1b. If sequences have unequal numbers of subsequences, no more forwards are
    in flight at a time than the remaining sequences need.
    """
    forward, _, least = _one_stage(request.lengths)
    ahead = request.warmup_per_hop * (request.num_ranks - 1 - rank)
    return _paired_up(request.lengths, min(ahead, len(forward) - least))


@lru_cache(maxsize=16)
def _paired_up(lengths: Lengths, ahead: int) -> RankOrder:
    """Return the order of one stage; ranks that run all forwards first share the same list."""
    forward, backward, _ = _one_stage(lengths)
    return steps.pair_up(forward, backward=backward, ahead=ahead)


@lru_cache(maxsize=16)
def _one_stage(lengths: Lengths) -> tuple[tuple[Step, ...], tuple[Step, ...], int]:
    """Return forward steps, backward steps and least warm-up of a rank with one stage."""
    groups = [range(len(lengths))]
    forward = steps.forward_steps(lengths, groups=groups, num_virtual=1)
    backward = steps.backward_steps(lengths, groups=groups, num_virtual=1)
    return tuple(forward), tuple(backward), steps.least_warmup(forward, backward=backward)


def _sppo(request: _Request, rank: int) -> RankOrder:
    """Return the order of the SPPO paper (its section 6): Seq1F1B over the subsequences.

    A single rank has no bubble to fill, so it runs sequence after sequence, which keeps the K/V
    of one sequence in memory instead of two.
    """
    if request.num_ranks > 1:
        return _seq1f1b(request, rank)
    order: RankOrder = []
    for sequence in request.everything:
        alone = range(sequence, sequence + 1)
        forward = steps.forward_units(request.lengths, sequences=alone)
        backward = steps.backward_units(request.lengths, sequences=alone)
        order.extend(("F", (0, unit)) for unit in forward)
        order.extend(("B", (0, unit)) for unit in backward)
    return order


def _interleaved(request: _Request, rank: int) -> RankOrder:
    """Return the interleaved 1F1B order over groups of sequences with any number of units.

    A rank runs two forwards ahead per hop to the last rank, as in Megatron-LM. If sequences have
    unequal numbers of subsequences, no more forwards are in flight at a time than the remaining
    sequences need.
    """
    lengths, num_virtual = request.lengths, request.num_virtual
    groups = steps.sequence_groups(lengths, num_ranks=request.num_ranks)
    forward = steps.forward_steps(lengths, groups=groups, num_virtual=num_virtual)
    backward = steps.backward_steps(lengths, groups=groups, num_virtual=num_virtual)
    hops = request.num_ranks - 1 - rank
    return steps.pair_up(forward, backward=backward, ahead=2 * hops, hops=hops)


def _looped_bfs(request: _Request, rank: int) -> RankOrder:
    """Return the breadth-first order: all units of a group pass one stage, then the next stage.

    Backward takes the stages in reverse, before the next group begins, so K/V and their gradients
    are in use on one stage of the rank at a time. A pipeline idles (p - 1) / (v * N + p - 1) of a
    sequence of N subsequences, with v stages on each of p ranks (Lamy-Poirier, Breadth-First
    Pipeline Parallelism, section 4, there over micro-batches). A group is one sequence, or as many
    as give every rank a unit.
    """
    return _breadth_first(request.lengths, request.num_ranks, request.num_virtual)


@lru_cache(maxsize=16)
def _breadth_first(lengths: Lengths, num_ranks: int, num_virtual: int) -> RankOrder:
    """Return the looped breadth-first order, which is the same list on all ranks."""
    order: RankOrder = []
    for group in steps.sequence_groups(lengths, num_ranks=num_ranks):
        forward, backward = (
            pass_of(lengths, groups=[group], num_virtual=num_virtual)
            for pass_of in (steps.forward_steps, steps.backward_steps)
        )
        order.extend(("F", step) for step in forward)
        order.extend(("B", step) for step in backward)
    return order


def _zero_bubble(request: _Request, rank: int) -> RankOrder:
    """Return the ZB-H1 order: 1F1B over subsequences, each weight half `rank` backwards late."""
    if request.forward_only:
        return _seq1f1b(request, rank)
    return steps.delay_weights(_seq1f1b(request, rank), delay=rank)


_ORDERS: dict[str, Callable[[_Request, int], RankOrder]] = {
    "gpipe": _gpipe,
    "1f1b": _seq1f1b,
    "interleaved_1f1b": _interleaved,
    "seq1f1b": _seq1f1b,
    "interleaved_seq1f1b": _interleaved,
    "looped_bfs": _looped_bfs,
    "zb_h1": _zero_bubble,
    "seq_zb_h1": _zero_bubble,
    "sppo": _sppo,
}
# Schedules whose warm-up can be lengthened to hide the latency of messages.
_WITH_LONGER_WARMUP = ("1f1b", "seq1f1b", "zb_h1", "seq_zb_h1", "sppo")


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
    if request.warmup_per_hop not in (1, 2):
        raise ValueError(
            f"hop is {request.warmup_per_hop}: must be 1, or 2 to hide the latency of messages"
        )
    if request.warmup_per_hop > 1 and name not in _WITH_LONGER_WARMUP:
        raise ValueError(
            f"hop {request.warmup_per_hop} lengthens the warm-up of "
            f"{', '.join(_WITH_LONGER_WARMUP)}, not of {quoted(name)}: set hop to 1, or "
            "use one of those"
        )
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
