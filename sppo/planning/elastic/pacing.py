"""Pacing: how far ahead of backwards the ranks of a pipeline run forwards if memory is short.

A schedule runs forwards ahead of the next backward so that no rank waits: for sequences of n
subsequences, Seq1F1B holds n + p - 1 - r units on rank r of p. A backward depends only on the
forwards of its own sequence. A rank without room for more units begins the forwards of later
sequences later. Each later rank then runs at least one unit less far ahead than the rank before it,
since its inputs also arrive later. Thus a long sequence may be alone in memory, and the next one
begins while its last backwards run. InfiniPipe instead ends one pipeline before it begins the next
(sequence grouping). With pacing, pipelines drain and fill at the same time, and each rank begins as
soon as it has room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sppo.cost.candidate import Candidate
from sppo.cost.deferred_weights import weight_operand_bytes
from sppo.cost.memory.stage_memory import kv_tokens
from sppo.cost.memory.units_in_flight import Running
from sppo.schedule.costs import Table
from sppo.schedule.encoding import B, F
from sppo.schedule.orders.names import DEFERRING_WEIGHTS, LOOPED
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward, encoded_orders

Indices = npt.NDArray[np.intp]


def can_be_paced(candidate: Candidate) -> bool:
    """Return whether ranks may begin forwards later than the schedule of a candidate does.

    False if ranks have several stages, or end one group of sequences before they begin the next.
    """
    return (
        bool(candidate.packed)
        and candidate.pipeline_parallel_degree > 1
        and candidate.virtual_stages == 1
        and candidate.schedule not in (LOOPED, "sppo_msp")
    )


def pace_forwards(
    candidate: Candidate, *, held: Table, running: Running, room: Table
) -> ForwardsBeforeBackward:
    """Return the number of forwards that each rank begins before each backward, limited by memory.

    At most the number of the schedule, and at least all forwards of the backward's sequence,
    whether these fit or not. No rank begins more than the rank before it, so there is no deadlock.

    Args:
        candidate: Candidate that can be paced.
        held: Bytes of a unit from its forward to the end of its backward, [stages, units].
        running: Bytes of a unit while it runs.
        room: Bytes available for units, their K and V, and the gradients of K and V, [ranks].
    """
    order = _backward_order(candidate)
    paced: list[tuple[int, ...]] = []
    codes, _ = encoded_orders(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths,
    )
    for rank, own_codes in enumerate(codes):
        most = np.cumsum(own_codes == F)[own_codes == B]
        if paced:
            before = np.array(paced[-1])
            most = np.minimum(most, np.where(before < len(order.units), before - 1, before))
        own = _rank_bytes(candidate, order, held=held[rank], rank=rank)
        paced.append(
            own.forwards_before_backward(
                order, running, most=most, room=float(room[rank]), rank=rank
            )
        )
    return tuple(paced)


class _BackwardOrder(NamedTuple):
    """Order of the backwards of a rank with one stage; forwards run in the order of the units."""

    units: Indices
    """Unit of each backward, [backwards]."""
    needed: Indices
    """Number of forwards up to the last one of each backward's sequence, [backwards]."""
    firsts: Indices
    """Index of the first unit, and of the first backward, of each sequence, [sequences]."""
    ends: Indices
    """One past the index of the last unit of each sequence, [sequences]."""


def _backward_order(candidate: Candidate) -> _BackwardOrder:
    spans = candidate.distinct_sequences
    firsts, ends = (np.array([getattr(own, name) for own in spans]) for name in ("start", "stop"))
    needed = np.repeat(ends, ends - firsts)
    begins = np.repeat(firsts, ends - firsts)
    return _BackwardOrder(begins + needed - 1 - np.arange(len(needed)), needed, firsts, ends)


class _RankBytes(NamedTuple):
    """Bytes that a rank holds: bytes taken by its forwards, less bytes freed by its backwards."""

    taken: Table
    """Bytes of units, and of K and V of their sequences, after 0, 1, ... forwards, [units + 1]."""
    freed: Table
    """Bytes freed before each backward, less operands of deferred weight gradients, [units]."""
    gradients: Table
    """Bytes of K/V gradients that each backward allocates; 0 after a sequence's first, [units]."""

    def forwards_before_backward(
        self, order: _BackwardOrder, running: Running, *, most: Indices, room: float, rank: int
    ) -> tuple[int, ...]:
        """Return the number of forwards begun before each backward: `most`, if there is room.

        Args:
            order: Order of the rank's backwards.
            running: Bytes of a unit while it runs.
            most: Number of forwards that the schedule begins before each backward, [units].
            room: Bytes available on the rank.
            rank: Pipeline rank.
        """
        beside = running.backward[rank][order.units] + self.gradients
        fitting = np.searchsorted(self.taken, room - beside + self.freed, side="right") - 1
        # Units that have begun also take memory during later backwards.
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
    allocated, released = np.zeros((2, count + 1))
    allocated[1:], released[1:] = held, held[order.units]
    allocated[order.firsts + 1] += keys
    released[order.ends] += keys + of_keys
    # The first backward of a sequence allocates K/V gradients; they count after it, not before.
    released[order.firsts + 1] -= of_keys
    freed = np.cumsum(released)[:count]
    gradients = np.zeros(count)
    gradients[order.firsts] = of_keys
    if candidate.schedule in DEFERRING_WEIGHTS:
        formed = np.cumsum(np.pad(weight_operand_bytes(candidate)[rank][order.units], (1, 0)))
        places = np.arange(count)
        freed = freed - (formed[places] - formed[np.maximum(0, places - rank)])
    return _RankBytes(np.cumsum(allocated), freed, gradients)
