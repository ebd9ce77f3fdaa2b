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

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_tokens
from sppo.cost.stage_cost import weight_operand_bytes
from sppo.schedule.actions import Op
from sppo.schedule.costs import Table
from sppo.schedule.graph import Ints
from sppo.schedule.orders.names import DEFERRING_WEIGHTS, LOOPED
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward, encoded_orders


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
    candidate: Candidate, *, held: Table, running: Table, room: Table
) -> ForwardsBeforeBackward:
    """Return the number of forwards that each rank begins before each backward, limited by memory.

    At most the number of the schedule, and at least all forwards of the backward's sequence,
    whether these fit or not. No rank begins more than the rank before it, so there is no deadlock.

    Args:
        candidate: Candidate that can be paced.
        held: Bytes of a unit from its forward to the end of its backward, [stages, units].
        running: Bytes of a unit during its forward, and its backward, [2, stages, units].
        room: Bytes available for units, their K and V, and the gradients of K and V, [ranks].
    """
    codes, _ = encoded_orders(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths,
    )
    forward, backward = running
    spans = candidate.distinct_sequences
    needed = np.concatenate([np.full(own.stop - own.start, own.stop) for own in spans])
    backwards = np.concatenate([np.arange(own.start, own.stop)[::-1] for own in spans])
    paced: list[tuple[int, ...]] = []
    for rank, own in enumerate(_bytes_of_ranks(candidate, backwards, held=held)):
        most = np.cumsum(codes[rank] == Op.F)[codes[rank] == Op.B]
        if paced:
            before = np.array(paced[-1])
            most = np.minimum(most, np.where(before < len(needed), before - 1, before))
        beside = backward[rank][backwards] + own.gradients
        fitting = np.searchsorted(own.taken, room[rank] - beside + own.freed, side="right") - 1
        # Units that have begun also take memory during later backwards.
        until = np.minimum(most, np.maximum(needed, fitting))
        until = np.minimum.accumulate(until[::-1])[::-1]
        spare = room[rank] - own.taken[1:] - forward[rank]
        paced.append((*_begun(until, needed, spare=spare, freed=own.freed),))
    return tuple(paced)


def _begun(until: Ints, needed: Ints, *, spare: Table, freed: Table) -> Iterator[int]:
    """Yield the number of forwards begun before each backward of a rank.

    Args:
        until: Most forwards before each backward, [backwards].
        needed: Number of forwards up to the last one of each backward's sequence, [backwards].
        spare: Bytes that are left while each forward runs if no backward has run, [forwards].
        freed: Bytes freed before each backward, [backwards].
    """
    done = 0
    for most, least, free in zip(until.tolist(), needed.tolist(), freed.tolist(), strict=True):
        done = max(done, least)
        while done < most and spare[done] + free >= 0:
            done += 1
        yield done


class _RankBytes(NamedTuple):
    """Bytes that a rank holds: bytes taken by its forwards, less bytes freed by its backwards."""

    taken: Table
    """Bytes of units, and of K and V of their sequences, after 0, 1, ... forwards, [units + 1]."""
    freed: Table
    """Bytes freed before each backward, less operands of deferred weight gradients, [units]."""
    gradients: Table
    """Bytes of K/V gradients that each backward allocates; 0 after a sequence's first, [units]."""


def _bytes_of_ranks(candidate: Candidate, backwards: Ints, *, held: Table) -> Iterator[_RankBytes]:
    """Yield the bytes of each rank.

    Args:
        candidate: Candidate that can be paced.
        backwards: Unit of each backward.
        held: Bytes of a unit from its forward to the end of its backward, [stages, units].
    """
    count, places = len(backwards), np.arange(len(backwards))
    spans, of_tokens = candidate.distinct_sequences, kv_tokens(candidate)
    firsts, ends = (np.array([getattr(own, name) for own in spans]) for name in ("start", "stop"))
    tokens = np.array([sequence.tokens for sequence in candidate.packed], dtype=np.float64)
    for rank in range(candidate.pipeline_parallel_degree):
        keys, of_keys = (of_stages[rank] * tokens for of_stages in of_tokens)
        allocated, released = np.zeros((2, count + 1))
        allocated[1:], released[1:] = held[rank], held[rank][backwards]
        allocated[firsts + 1] += keys
        released[ends] += keys + of_keys
        # The first backward of a sequence allocates K/V gradients; they count after it.
        released[firsts + 1] -= of_keys
        freed = np.cumsum(released)[:count]
        gradients = np.zeros(count)
        gradients[firsts] = of_keys
        if candidate.schedule in DEFERRING_WEIGHTS:
            operands = weight_operand_bytes(candidate)[rank][backwards]
            formed = np.cumsum(np.pad(operands, (1, 0)))
            freed -= formed[places] - formed[np.maximum(0, places - rank)]
        yield _RankBytes(np.cumsum(allocated), freed, gradients)
