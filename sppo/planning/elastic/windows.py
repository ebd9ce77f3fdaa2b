"""Windows: the units whose tensors a pipeline rank holds at the same moment.

Windows follow from the order of the rank's compute alone, for any schedule that runs units whole.
Backwards lie on *diagonals*: the k-th backward of rank r of p is on diagonal k + p - 1 - r. In a
steady pipeline, the backwards of one diagonal run at the same time, each rank one unit behind the
rank after it (InfiniPipe's C[f2b(k) + d_p - p]).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sppo.cost.candidate import Candidate
from sppo.cost.deferred_weights import weight_operand_bytes
from sppo.cost.memory.stage_memory import kv_tokens
from sppo.cost.memory.units_in_flight import KVTokens, kv_return
from sppo.schedule.costs import Table
from sppo.schedule.orders.rank_orders import RankOrder, rank_orders

Indices = npt.NDArray[np.intp]
_NEVER = -1


@dataclass(frozen=True, slots=True, eq=False)
class RankWindows:
    """Units that one rank holds at each moment. Units are in the order of their backwards.

    Attributes:
        rank: Pipeline rank.
        stages: Stage of each unit, [units of the rank].
        units: Index of each unit's subsequence in the candidate's lengths, [units of the rank].
        diagonals: Diagonal of each unit's backward, [units of the rank].
        holds: Whether saved tensors of a unit are held, [moments, units of the rank].
        running: Index of the running unit among the units of the rank, [moments].
        is_backward: Whether the running unit runs its backward, [moments].
        fixed_bytes: Bytes that do not depend on the placement: K and V, their gradients, and
            operands of deferred weight gradients, [moments].
    """

    rank: int
    stages: Indices
    units: Indices
    diagonals: Indices
    holds: npt.NDArray[np.bool_]
    running: Indices
    is_backward: npt.NDArray[np.bool_]
    fixed_bytes: Table

    def of_units(self, tables: Table) -> Table:
        """Return the entries of `tables` for the units of the rank, [units of the rank, levels].

        Args:
            tables: Values by level, stage and subsequence, [levels, stages, subsequences].
        """
        own: Table = tables[:, self.stages, self.units].T
        return own


def rank_windows(candidate: Candidate) -> tuple[RankWindows, ...]:
    """Return the windows of every rank, one moment per forward or backward of the rank.

    Args:
        candidate: Candidate with packed sequences.
    """
    assert candidate.packed, "units are told apart by their places among all of a step"
    orders = rank_orders(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths,
        num_virtual=candidate.virtual_stages,
        forwards_before_backward=candidate.forwards_before_backward,
    )
    operands, kv = weight_operand_bytes(candidate), kv_tokens(candidate)
    return tuple(
        _windows_of(candidate, order, rank=rank, operands=operands, kv=kv)
        for rank, order in enumerate(orders)
    )


def _windows_of(
    candidate: Candidate, order: RankOrder, *, rank: int, operands: Table, kv: KVTokens
) -> RankWindows:
    firsts = [own.start for own in candidate.distinct_sequences]
    stage_of = candidate.stages_of_rank(rank)
    steps = [step for kind, step in order if kind == "B"]
    place_of = {step: place for place, step in enumerate(steps)}
    stages = np.array([stage_of[virtual] for virtual, _ in steps])
    sequences = np.array([sequence for _, (sequence, _) in steps])
    units = np.array([firsts[sequence] + within for _, (sequence, within) in steps])
    index_of = {action: index for index, action in enumerate(order)}
    begins, ends, weights = (
        np.array([index_of.get((kind, step), _NEVER) for step in steps]) for kind in "FBW"
    )
    kinds = [kind for kind, _ in order]
    # A forward before another one holds fewer units, but may need more memory while it runs.
    moments = [index for index, kind in enumerate(kinds) if kind != "W"]
    at = np.array(moments)[:, None]
    waits = (ends < at) & (at <= weights)
    spans = _Spans(stages, sequences, begins, ends)
    return RankWindows(
        rank,
        stages,
        units,
        diagonals=np.arange(len(steps)) + candidate.pipeline_parallel_degree - 1 - rank,
        holds=(begins <= at) & (at <= ends),
        running=np.array([place_of[order[index][1]] for index in moments]),
        is_backward=np.array([kinds[index] == "B" for index in moments]),
        fixed_bytes=waits @ operands[stages, units] + spans.kv_bytes(candidate, at, kv),
    )


class _Spans(NamedTuple):
    """Forwards and backwards of the units of a rank, as indices in its order of compute.

    All arrays are [units of the rank].
    """

    stages: Indices
    sequences: Indices
    begins: Indices
    """Index of the forward of each unit."""
    ends: Indices
    """Index of the backward of each unit."""

    def kv_bytes(self, candidate: Candidate, at: Indices, kv: KVTokens) -> Table:
        """Return the bytes of K, V and their gradients at given moments, [moments].

        Args:
            candidate: Candidate with packed sequences.
            at: Moments as indices in the rank's order of compute, [moments, 1].
            kv: Bytes of K and V, and of their gradients, per token on each stage.
        """
        tokens = np.array([sequence.tokens for sequence in candidate.packed], dtype=np.float64)
        keys, own = np.unique(self.stages * len(tokens) + self.sequences, return_inverse=True)
        stages, sequences = np.divmod(keys, len(tokens))
        first, first_backward = np.full((2, len(keys)), np.iinfo(np.intp).max)
        last, last_forward = np.full((2, len(keys)), _NEVER)
        np.minimum.at(first, own, self.begins)
        np.minimum.at(first_backward, own, self.ends)
        np.maximum.at(last, own, self.ends)
        np.maximum.at(last_forward, own, self.begins)
        back = np.zeros(len(keys))
        for key, stage in enumerate(stages.tolist()):
            if candidate.kv_of_stage(stage) != "retained":
                back[key] = self._back(candidate, own == key, before=int(first_backward[key]))
        there = (first <= at) & (at <= last) & ((at <= last_forward) | (back <= at))
        held: Table = there @ (kv.kv[stages] * tokens[sequences])
        held += ((first_backward <= at) & (at <= last)) @ (kv.gradients[stages] * tokens[sequences])
        return held

    def _back(self, candidate: Candidate, own: npt.NDArray[np.bool_], *, before: int) -> int:
        """Return the index in the order of compute at which offloaded or recomputed K and V return.

        Args:
            candidate: Candidate with packed sequences.
            own: Mask of the units of the stage and sequence, [units of the rank].
            before: Index of the sequence's first backward on the stage.
        """
        if candidate.kv == "recomputed":
            return before
        forwards, backwards = np.sort(self.begins[own]), np.sort(self.ends)
        return kv_return(forwards.tolist(), backwards.tolist(), before=before)
