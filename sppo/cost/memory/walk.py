"""Walk along the programs of pipeline ranks: what each rank holds while each of its actions runs.

A rank holds saved tensors of a unit from its forward to the end of its backward, and K and V of a
sequence from the first forward on the stage to the last backward there. Which actions begin and end
what follows from the order of a rank's compute alone, so peaks are exact without simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sppo.cost.candidate import Candidate
from sppo.schedule.costs import Table
from sppo.schedule.encoding import B, F
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward, encoded_orders
from sppo.schedule.orders.steps import Indices, sequence_groups

Mask = npt.NDArray[np.bool_]


class Spans(NamedTuple):
    """Sequences on the stages of all ranks, one entry for each stage and sequence, [spans].

    Moments are places in arrays of [ranks, actions], raveled.
    """

    stages: Indices
    sequences: Indices
    first_forward: Indices
    last_forward: Indices
    return_begin: Indices
    """Moment of the backward before which offloaded K and V begin to come back."""
    first_backward: Indices
    last_backward: Indices
    last_action: Indices
    """Moment of the last backward, or of its weight half if that is deferred."""


@dataclass(frozen=True, eq=False)
class Walk:
    """Compute of all ranks in the order of their programs. Arrays are [ranks, actions].

    Attributes:
        is_forward: Whether each action is a forward.
        is_backward: Whether each action is a backward; others are weight halves of backwards.
        stages: Stage of each action.
        sequences: Sequence of each action.
        parts: Subsequence of each action within its sequence.
        units: Index of each action's subsequence in tables of [stages, subsequences].
        num_units: Number of subsequences in such tables.
        num_parts: Number of subsequences of each sequence, [sequences].
    """

    is_forward: Mask
    is_backward: Mask
    stages: Indices
    sequences: Indices
    parts: Indices
    units: Indices
    num_units: int
    num_parts: Indices

    @cached_property
    def keys(self) -> Indices:
        """Number of each action's unit: its place in a raveled table of [stages, subsequences]."""
        keys: Indices = self.stages * self.num_units + self.units
        return keys

    @cached_property
    def begins(self) -> Table:
        """1 for actions from which on a unit is held, -1 for those that end it, else 0."""
        begins: Table = self.is_forward.astype(np.float64) - self.is_backward
        return begins

    @cached_property
    def defers(self) -> Table:
        """1 for backwards whose weight half is deferred, -1 for weight halves, else 0."""
        is_weight_half = ~(self.is_forward | self.is_backward)
        defers: Table = self.is_backward.astype(np.float64) - is_weight_half
        return defers * is_weight_half.any()

    @cached_property
    def spans(self) -> Spans:
        """Sequences on the stages of all ranks, in the order of stages, then of sequences."""
        is_first, is_last = self.parts == 0, self.parts == self.num_parts[self.sequences] - 1
        owners = (self.stages * len(self.num_parts) + self.sequences).ravel()
        num_spans = (int(self.stages.max()) + 1) * len(self.num_parts)

        def moments(which: Mask) -> Indices:
            """Return when the last of such actions runs, of each stage and sequence."""
            found = np.flatnonzero(which)
            order = np.argsort(owners[found], kind="stable")
            return found[order].reshape(num_spans, -1)[:, -1]

        # Forwards of a sequence run from its first subsequence on, backwards from its last.
        opens, turns = (moments(self.is_forward & at) for at in (is_first, is_last))
        comes_back, closes = (moments(self.is_backward & at) for at in (is_last, is_first))
        ends = moments(~self.is_forward & is_first)
        stages, sequences = np.divmod(owners[opens], len(self.num_parts))
        # :func:`sppo.schedule.transfers.kv_placement.place_kv` spreads the H2D copies of a sequence
        # over as many backwards of the rank as it has units, directly before its own backwards.
        backwards = np.flatnonzero(self.is_backward)
        possible, end = np.searchsorted(backwards, turns), np.searchsorted(backwards, comes_back)
        returns = backwards[np.maximum(possible, end - self.num_parts[sequences])]
        return Spans(stages, sequences, opens, turns, returns, comes_back, closes, ends)

    def of_actions(self, table: Table) -> Table:
        """Return the entry of [stages, subsequences] for the unit of each action."""
        return table.ravel().take(self.keys)

    def during(self, *spans: tuple[Indices, Indices, Table]) -> Table:
        """Return the bytes that spans hold while each action runs.

        Args:
            spans: Moments of the first and of the last action of spans, and their bytes.
        """
        ranks, count = self.stages.shape
        changes = np.zeros((ranks, count + 1))
        for first, last, held in spans:
            np.add.at(changes.ravel(), first + first // count, held)
            np.subtract.at(changes.ravel(), last + last // count + 1, held)
        bytes_held: Table = np.cumsum(changes[:, :count], axis=1)
        return bytes_held


def walk_of(candidate: Candidate) -> Walk:
    """Return the walk along the programs of a candidate whose units run whole."""
    return _walk(
        candidate.schedule,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths[: _distinct_sequences(candidate)],
        num_virtual=candidate.virtual_stages,
        forwards_before_backward=candidate.forwards_before_backward,
        packed=bool(candidate.packed),
    )


def _distinct_sequences(candidate: Candidate) -> int | None:
    """Return the sequences after which programs repeat, if all are cut alike; None for all.

    In 1F1B order, the units that run ahead of a backward are those of the same sequence and as many
    more as the pipeline has further ranks. In the looped order, each group of sequences ends before
    the next begins, and no group is larger than the first.
    """
    ranks = candidate.pipeline_parallel_degree
    if candidate.packed:
        return None
    if candidate.order in ("sppo", "seq1f1b", "1f1b"):
        return 2 + -(-(ranks - 1) // len(candidate.lengths))
    if candidate.order == LOOPED:
        return len(sequence_groups(candidate.sequence_lengths, num_ranks=ranks)[0])
    return None


@lru_cache(maxsize=64)
def _walk(
    schedule: str,
    *,
    num_ranks: int,
    lengths: tuple[tuple[int, ...], ...],
    num_virtual: int,
    forwards_before_backward: ForwardsBeforeBackward,
    packed: bool,
) -> Walk:
    """Return the walk of all ranks, cached because it does not depend on the placement.

    Args:
        schedule: Name of the schedule.
        num_ranks: Pipeline ranks.
        lengths: Tokens of each subsequence of each sequence.
        num_virtual: Stages of a rank.
        forwards_before_backward: Forwards that each rank begins before each backward; empty for
            those of the schedule.
        packed: Whether the subsequences of all sequences are numbered through.
    """
    codes, steps = encoded_orders(
        schedule,
        num_ranks=num_ranks,
        lengths=lengths,
        num_virtual=num_virtual,
        forwards_before_backward=forwards_before_backward,
    )
    num_parts = np.array([len(own) for own in lengths])
    turns, units = np.divmod(steps, num_parts.sum())
    sequences = np.repeat(np.arange(len(lengths)), num_parts)[units]
    parts = units - (np.cumsum(num_parts) - num_parts)[sequences]
    return Walk(
        codes == F,
        codes == B,
        stages=np.arange(num_ranks)[:, None] + num_ranks * turns,
        sequences=sequences,
        parts=parts,
        units=units if packed else parts,
        num_units=int(num_parts.sum() if packed else num_parts[0]),
        num_parts=num_parts,
    )
