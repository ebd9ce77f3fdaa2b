"""Pacing: how far ahead of backwards the ranks of a pipeline run forwards if memory is short.

A schedule runs forwards ahead of the next backward so that no rank waits: for sequences of n
subsequences, Seq1F1B holds n + p - 1 - r units on rank r of p. A backward depends only on the
forwards of its own sequence. A rank without room for more units begins the forwards of later
sequences later. Each later rank then runs at least one unit less far ahead than the rank before it,
since its inputs also arrive later. First ranks without a backward hold no units and are not paced.
Thus a long sequence may be alone in memory, and the next one begins while its last backwards run.
InfiniPipe instead ends one pipeline before it begins the next (sequence grouping). With pacing,
pipelines drain and fill at the same time, and each rank begins as soon as it has room.
"""

from __future__ import annotations

import numpy as np

from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_of_sequences
from sppo.cost.memory.walk import Mask, walk_of
from sppo.cost.stages.seconds import weight_operand_bytes
from sppo.schedule.costs import Table
from sppo.schedule.graph import Ints
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward


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
    K and V of layers without a backward count as long as the others of their stage.

    Args:
        candidate: Candidate that can be paced.
        held: Bytes of a unit from its forward to the end of its backward, [stages, units].
        running: Bytes of a unit during its forward, and its backward, [2, stages, units].
        room: Bytes available for units, their K and V, and the gradients of K and V, [ranks].
    """
    walk, spans = walk_of(candidate), candidate.distinct_sequences
    is_forward, is_backward = walk.is_forward, walk.is_backward
    first = candidate.forward_only_stages
    room = room[first:]

    def of(which: Mask, table: Table) -> Table:
        """Return the entries of [ranks, actions] of forwards or of backwards, [paced ranks, units].

        Ranks without a backward are left out.
        """
        return table[first:][which[first:]].reshape(len(room), -1)

    keys, of_keys, passing = (
        of_sequences[walk.stages, walk.sequences] for of_sequences in kv_of_sequences(candidate)
    )
    keys = keys + passing
    saved, (before, beside) = walk.of_actions(held), map(walk.of_actions, running)
    # Bytes that the forwards of a rank allocate, and those that its backwards free.
    taken = np.cumsum(of(is_forward, saved + keys * walk.is_first_part), axis=1)
    gradients = of(is_backward, of_keys * walk.is_last_part)
    freed = of(is_backward, saved + (keys + of_keys) * walk.is_first_part) - gradients
    freed = np.cumsum(np.pad(freed, ((0, 0), (1, 0))), axis=1)[:, :-1]
    deferred = walk.of_actions(weight_operand_bytes(candidate)) * walk.defers
    freed -= of(is_backward, np.cumsum(deferred, axis=1) - deferred)
    # Forwards that fit while each backward runs, and bytes left while each forward runs.
    left = room[:, None] + freed - of(is_backward, beside) - gradients
    spare = room[:, None] - taken - of(is_forward, before)
    begun_before = np.cumsum(is_forward, axis=1, dtype=np.float64)
    scheduled = of(is_backward, begun_before).astype(np.intp)
    needed = np.repeat(*np.array([(own.stop, own.stop - own.start) for own in spans]).T)
    paced: list[Ints] = []
    for rank, most in enumerate(scheduled):
        if paced:
            most = np.minimum(most, paced[-1] - (paced[-1] < len(needed)))
        fitting = np.searchsorted(taken[rank], left[rank], side="right")
        # Units that have begun also take memory during later backwards.
        until = np.minimum(most, np.maximum(needed, fitting))
        until = np.minimum.accumulate(until[::-1])[::-1]
        least_spare = np.minimum.accumulate(spare[rank])
        begun = np.searchsorted(-least_spare, freed[rank], side="right")
        paced.append(np.maximum.accumulate(np.maximum(needed, np.minimum(until, begun))))
    return ((len(needed),) * len(needed),) * first + tuple(
        tuple(counts.tolist()) for counts in paced
    )
