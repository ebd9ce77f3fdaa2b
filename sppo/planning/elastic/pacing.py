"""Pacing: how far ahead the ranks of a pipeline run where there is no room to run freely.

A schedule begins forwards ahead of the backward that comes next, so that no rank waits: Seq1F1B
holds n + p - 1 - r units on rank r of p, of sequences of n subsequences. All that a backward needs
are the forwards of its own sequence. Where a rank has no room for more it begins others later, and
the ranks behind it one unit less far ahead than the rank before them: what they would wait for
comes later, too. So a long sequence may be alone in memory, and the next one begins while its last
backwards run. InfiniPipe ends a pipeline before it begins the next one there (sequence grouping);
paced, pipelines drain and fill at the same time, and each rank begins as soon as it has room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sppo.cost.candidate import Candidate
from sppo.cost.memory.stage_memory import kv_tokens
from sppo.cost.memory.units_in_flight import Running
from sppo.cost.stage_cost import weight_operand_bytes
from sppo.schedule.costs import Table
from sppo.schedule.generators import DEFERRING_WEIGHTS, LOOPED, Begun, rank_orders

Places = npt.NDArray[np.intp]


def can_be_paced(candidate: Candidate) -> bool:
    """Whether ranks may begin forwards later than the schedule of a candidate does.

    Not where they have several stages, or end a group of sequences before the next begins.
    """
    return (
        bool(candidate.packed)
        and candidate.pipeline_parallel_degree > 1
        and candidate.virtual_stages == 1
        and candidate.schedule not in (LOOPED, "sppo_msp")
    )


def begun_within(candidate: Candidate, *, held: Table, running: Running, room: Table) -> Begun:
    """Return how many forwards each rank has begun before each backward, as there is room.

    At most as many as the schedule has begun, and at least those of the sequence of the backward,
    whether these fit or not. No rank has begun more than the one before it, so none waits for ever.

    Args:
        candidate: one that can be paced.
        held: bytes of a unit from its forward to the end of its backward, [stages, units].
        running: bytes of a unit while it runs.
        room: bytes that units, their K and V and the gradients of these may take, [ranks].
    """
    order = _backward_order(candidate)
    begun: list[tuple[int, ...]] = []
    free = rank_orders(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths,
    )
    for rank, steps in enumerate(free):
        is_forward = np.array([kind == "F" for kind, _ in steps])
        is_backward = [kind == "B" for kind, _ in steps]
        most = np.cumsum(is_forward)[is_backward]
        if begun:
            before = np.array(begun[-1])
            most = np.minimum(most, np.where(before < len(order.units), before - 1, before))
        own = _rank_bytes(candidate, order, held=held[rank], rank=rank)
        begun.append(own.begun(order, running, most=most, room=float(room[rank]), rank=rank))
    return tuple(begun)


class _BackwardOrder(NamedTuple):
    """Backwards of a rank with one stage, in order; forwards run in the order of the units."""

    units: Places
    """Of each backward."""
    needed: Places
    """Forwards up to the last one of its sequence."""
    firsts: Places
    """Unit, and place among backwards, with which each sequence begins, [sequences]."""
    ends: Places
    """One past its last."""


def _backward_order(candidate: Candidate) -> _BackwardOrder:
    spans = candidate.distinct_sequences
    firsts, ends = (np.array([getattr(own, name) for own in spans]) for name in ("start", "stop"))
    needed = np.repeat(ends, ends - firsts)
    begins = np.repeat(firsts, ends - firsts)
    return _BackwardOrder(begins + needed - 1 - np.arange(len(needed)), needed, firsts, ends)


class _RankBytes(NamedTuple):
    """What a rank holds: what its forwards have taken, less what its backwards have freed."""

    taken: Table
    """After so many forwards: their units, K and V of their sequences, [units + 1]."""
    freed: Table
    """Before each backward, less operands that wait for their weight half, [units]."""
    gradients: Table
    """Of K and V of the sequence that each backward is the first one of; 0 of others, [units]."""

    def begun(
        self, order: _BackwardOrder, running: Running, *, most: Places, room: float, rank: int
    ) -> tuple[int, ...]:
        """Return how many forwards have begun before each backward: `most`, if there is room."""
        beside = running.backward[rank][order.units] + self.gradients
        fitting = np.searchsorted(self.taken, room - beside + self.freed, side="right") - 1
        # What has begun by now is there in later backwards, too.
        until = np.minimum(most, np.maximum(order.needed, fitting))
        until = np.minimum.accumulate(until[::-1])[::-1]
        during = self.taken[1:] + running.forward[rank]
        found: list[int] = []
        done = 0
        for backward, (end, needed) in enumerate(zip(until, order.needed, strict=True)):
            done = max(done, int(needed))
            while done < end and during[done] - self.freed[backward] <= room:
                done += 1
            found.append(done)
        return tuple(found)


def _rank_bytes(
    candidate: Candidate, order: _BackwardOrder, *, held: Table, rank: int
) -> _RankBytes:
    count = len(held)
    tokens = np.array([sequence.tokens for sequence in candidate.packed], dtype=np.float64)
    kv = kv_tokens(candidate)
    keys, of_keys = kv.kv[rank] * tokens, kv.gradients[rank] * tokens
    comes, goes = np.zeros((2, count + 1))
    comes[1:], goes[1:] = held, held[order.units]
    comes[order.firsts + 1] += keys
    goes[order.ends] += keys + of_keys
    # Gradients of K and V come with the first backward, which is not yet done before itself.
    goes[order.firsts + 1] -= of_keys
    freed = np.cumsum(goes)[:count]
    gradients = np.zeros(count)
    gradients[order.firsts] = of_keys
    if candidate.schedule in DEFERRING_WEIGHTS:
        formed = np.cumsum(np.pad(weight_operand_bytes(candidate)[rank][order.units], (1, 0)))
        places = np.arange(count)
        freed = freed - (formed[places] - formed[np.maximum(0, places - rank)])
    return _RankBytes(np.cumsum(comes), freed, gradients)
