"""Windows: the units whose tensors a pipeline rank holds at the same moment.

Windows follow from the order of the rank's compute alone, for any schedule that runs units whole.
Backwards lie on *diagonals*: the k-th backward of rank r of p is on diagonal k + p - 1 - r. In a
steady pipeline, the backwards of one diagonal run at the same time, each rank one unit behind the
rank after it (InfiniPipe's C[f2b(k) + d_p - p]).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sppo.cost.candidate import Candidate
from sppo.cost.deferred_weights import weight_operand_bytes
from sppo.cost.memory.stage_memory import kv_tokens
from sppo.cost.memory.units_in_flight import UnitsInFlight
from sppo.cost.memory.walk import Walk, walk_of
from sppo.schedule.costs import Table
from sppo.schedule.orders.steps import Indices


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
    walk = walk_of(candidate)
    operands = walk.of_actions(weight_operand_bytes(candidate))
    waiting = np.cumsum(operands * walk.defers, axis=1) - operands * np.maximum(0, walk.defers)
    fixed_bytes = UnitsInFlight(candidate).kv_during(kv_tokens(candidate)) + waiting
    ranks = range(candidate.pipeline_parallel_degree)
    return tuple(_windows_of(walk, rank, fixed_bytes[rank]) for rank in ranks)


def _windows_of(walk: Walk, rank: int, fixed_bytes: Table) -> RankWindows:
    """Return the windows of one rank.

    Args:
        walk: Walk along the programs of all ranks.
        rank: Pipeline rank.
        fixed_bytes: Bytes during each action of the rank that do not depend on the placement.
    """
    is_forward, is_backward = walk.is_forward[rank], walk.is_backward[rank]
    begins, ends = np.flatnonzero(is_forward), np.flatnonzero(is_backward)
    # A forward before another one holds fewer units, but may need more memory while it runs.
    moments = np.flatnonzero(is_forward | is_backward)
    keys = walk.keys[rank]
    begin_of, number_of = np.zeros((2, keys.max() + 1), dtype=np.intp)
    begin_of[keys[begins]] = begins
    number_of[keys[ends]] = np.arange(len(ends))
    at = moments[:, None]
    return RankWindows(
        rank,
        walk.stages[rank, ends],
        walk.units[rank, ends],
        diagonals=np.arange(len(ends)) + len(walk.stages) - 1 - rank,
        holds=(begin_of[keys[ends]] <= at) & (at <= ends),
        running=number_of[keys[moments]],
        is_backward=is_backward[moments],
        fixed_bytes=fixed_bytes[moments],
    )
