"""Walk along the programs of pipeline ranks: what each rank holds while each of its actions runs.

A rank holds saved tensors of a unit from its forward to the end of its backward, and K and V of a
sequence from the first forward on the stage to the last backward there. Layers without a backward
save nothing, and need K and V of a sequence up to its last forward. States of linear attention are
held as saved tensors are, since their gradients take their place. Which actions begin and end
what follows from the order of a rank's compute alone, so peaks are exact without simulation.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import Counts
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_of_sequences
from sppo.cost.linear_attention.states import states_of_units
from sppo.schedule.actions import Op
from sppo.schedule.costs import Table
from sppo.schedule.graph import Ints
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.orders.rank_orders import sequence_groups
from sppo.schedule.program import generate
from sppo.schedule.schedule import Schedule

Mask = npt.NDArray[np.bool_]
_NOTHING = np.zeros(1)


class Walk:
    """Compute of all ranks in the order of their programs. Arrays are [ranks, actions].

    Rows of ranks with fewer actions end with the action that never happens.

    Args:
        schedule: Programs of all ranks, of which the compute counts.
        packed: Whether tables have the subsequences of all sequences, numbered through, instead of
            those of one sequence.

    Attributes:
        actions: Number of each action in the columns of the schedule.
        stages: Stage of each action.
        sequences: Sequence of each action.
        units: Index of each action's subsequence in tables of [stages, subsequences].
        is_forward: Whether each action is a forward.
        is_backward: Whether each action is a backward.
        begins: 1 for forwards, from which on a unit is held, -1 for backwards, which end it, else
            0, as for forwards without a backward; of a shard, its share of the unit.
        defers: 1 for backwards whose weight half is deferred, -1 for weight halves, else 0.
        is_first_part: Whether each action runs the first subsequence of its sequence.
        is_last_part: Whether each action runs the last subsequence of its sequence.
    """

    def __init__(self, schedule: Schedule, *, packed: bool = False) -> None:
        of_ranks = schedule.split_by_rank(np.arange(schedule.never))
        codes = schedule.codes
        is_counted = np.isin(codes, (Op.F, Op.B, Op.W))
        own = [actions[is_counted[actions]] for actions in of_ranks]
        most = max(map(len, own))
        self.actions = np.full((schedule.num_ranks, most), schedule.never)
        for row, actions in zip(self.actions, own, strict=True):
            row[: len(actions)] = actions
        codes, self.stages, self.sequences = (
            column[self.actions] for column in (codes, schedule.stages, schedule.sequences)
        )
        before, behind = schedule.before[self.actions], schedule.behind[self.actions]
        self.units = schedule.units[self.actions] if packed else before
        self._num_units = schedule.num_units if packed else len(schedule.lengths[0])
        self._num_sequences, self._num_parts = schedule.num_sequences, before + behind + 1
        self.is_forward: Mask = codes == Op.F
        self.is_backward: Mask = codes == Op.B
        self._comes_back = self.is_forward & (self.stages >= schedule.forward_only_stages)
        held = self._comes_back.astype(np.float64) - self.is_backward
        self.begins: Table = held * schedule.shares[self.actions]
        is_weight_half = codes == Op.W
        self.defers: Table = (
            self.is_backward - is_weight_half.astype(np.float64)
        ) * is_weight_half.any()
        self.is_first_part, self.is_last_part = before == 0, behind == 0

    @cached_property
    def _keys(self) -> Ints:
        """Number of each action's unit: its place in a raveled table of [stages, subsequences]."""
        keys: Ints = self.stages * self._num_units + self.units
        return keys

    @cached_property
    def kv_returns(self) -> tuple[Ints, Ints]:
        """Last subsequences' backwards, and backwards before which their offloaded K/V come back.

        Both are places in raveled arrays of [ranks, actions].
        :func:`sppo.schedule.transfers.copies.place_copies` spreads the H2D copies of a sequence
        over as many backwards of the rank as it has units, directly before its own backwards.
        """
        owners = (self.stages * self._num_sequences + self.sequences).ravel()
        left, back = (
            found[np.argsort(owners[found], kind="stable")]
            for found in (
                np.flatnonzero(self._comes_back & self.is_last_part),
                np.flatnonzero(self.is_backward & self.is_last_part),
            )
        )
        backwards = np.flatnonzero(self.is_backward)
        possible, end = np.searchsorted(backwards, left), np.searchsorted(backwards, back)
        spread = self._num_parts.ravel()[back]
        return back, backwards[np.maximum(possible, end - spread)]

    def of_actions(self, table: Table) -> Table:
        """Return the entry of [stages, subsequences] for the unit of each action."""
        return table.ravel().take(self._keys)

    def held(self, saved: Table, *, deferred: Table | None = None) -> Table:
        """Return the bytes of units while each action runs, [ranks, actions].

        Args:
            saved: Bytes of a unit from its forward to the end of its backward, [stages, N].
            deferred: Bytes of a unit from its backward to the end of its weight half if that is
                deferred, [stages, N].
        """
        changes = self.of_actions(saved) * self.begins
        if deferred is not None and self.defers.any():
            changes += self.of_actions(deferred) * self.defers
        return during(changes)

    def running(self, passes: Table) -> Table:
        """Return the bytes of the unit that runs during each action, [ranks, actions].

        Args:
            passes: Bytes of a unit during its forward, and during its backward, [2, stages, N].
        """
        forward, backward = map(self.of_actions, passes)
        return np.where(self.is_forward, forward, backward * self.is_backward)

    def counts(self, weights: Table) -> Counts:
        """Return how many units of each subsequence are held at the rank's peak, [stages, N].

        Args:
            weights: Bytes of a unit, by which the peak is found, [stages, N].
        """
        fullest = np.cumsum(self.of_actions(weights) * self.begins, axis=1).argmax(axis=1)
        is_done = np.arange(self.units.shape[1]) <= fullest[:, None]
        counts = np.zeros(weights.size, dtype=np.int64)
        np.add.at(counts, self._keys[is_done], self.begins[is_done].astype(np.int64))
        return counts.reshape(weights.shape)

    @cached_property
    def sequences_held(self) -> Counts:
        """Most sequences of which each stage holds units at once, [stages]."""
        ends = np.where(self.defers.any(), self.defers < 0, self.is_backward)
        changes = self.is_first_part * (self._comes_back.astype(np.int64) - ends)
        turns = self.stages // len(self.stages)
        of_turns = [changes * (turns == turn) for turn in range(int(turns.max()) + 1)]
        most: Counts = np.concatenate([np.cumsum(own, axis=1).max(axis=1) for own in of_turns])
        return most


def during(changes: Table) -> Table:
    """Return the bytes held while each action runs, [ranks, actions], from changes by actions.

    What an action allocates counts while it runs, and so does what it frees: operands of a weight
    half are allocated in the backward before the saved tensors of the unit are freed.
    """
    total = np.cumsum(changes, axis=1)
    held: Table = np.maximum(total, total - changes)
    return held


@lru_cache(maxsize=16)
def kv_held(candidate: Candidate) -> tuple[Table, Table]:
    """Return the bytes of K and V, and of their gradients, while each action runs.

    K and V of a sequence are held on a stage from the first forward of the sequence to its last
    backward there, except between forward and backward where they are offloaded or recomputed;
    their gradients from the first backward to the last. K and V of layers without a backward are
    held until the last forward. Sequences of equal length leave the buffers
    to each other, from step to step, so these are always as large as at their own peaks.

    Returns:
        [ranks, actions] each, or [ranks, 1] if all sequences are cut alike; cached, must not be
        modified.
    """
    walk = walk_of(candidate)
    cut = walk.sequences if candidate.packed else np.zeros_like(walk.sequences)
    of_keys, of_gradients, of_forward_only = (
        of_sequences[walk.stages, cut] for of_sequences in kv_of_sequences(candidate)
    )
    placed = np.array(candidate.kv_of_stages)[walk.stages]
    turns, closes = walk.is_forward & walk.is_last_part, walk.is_backward & walk.is_first_part
    opens, comes_back = walk.is_forward & walk.is_first_part, walk.is_backward & walk.is_last_part
    begins = of_keys * (opens | (comes_back & (placed == "recomputed")))
    backs, returns = walk.kv_returns
    is_offloaded = placed.ravel()[backs] == "offloaded"
    np.add.at(begins.ravel(), returns[is_offloaded], of_keys.ravel()[backs[is_offloaded]])
    ends = of_keys * (closes | (turns & (placed != "retained")))
    kv, gradients = (
        _between(begins + of_forward_only * opens, ends + of_forward_only * turns),
        _between(of_gradients * comes_back, of_gradients * closes),
    )
    if candidate.packed:
        return kv, gradients
    return kv.max(axis=1, keepdims=True), gradients.max(axis=1, keepdims=True)


def bytes_at_peak(
    candidate: Candidate,
    walk: Walk,
    *,
    sent: Table,
    activations: Table = _NOTHING,
    computing: Table = _NOTHING,
) -> dict[str, Counts]:
    """Return the bytes of each rank by bucket when it holds most, [ranks] each.

    Saved tensors, K and V and their gradients are those of the moment when most of them are held
    together. Working set and messages count by as much as they raise the peak.

    Args:
        candidate: Candidate to price.
        walk: Walk along its programs, which may cut units.
        sent: Bytes of the messages of each action, [ranks, actions].
        activations: Bytes of saved tensors while each action runs, [ranks, actions].
        computing: Bytes of the working set of each action, [ranks, actions].
    """
    keys, gradients = kv_held(candidate)
    keys = keys + walk.held(states_of_units(candidate))
    held = keys + gradients + activations
    fullest = held.argmax(axis=1)[:, None]
    kv_bytes, gradient_bytes = (
        np.rint(np.take_along_axis(np.broadcast_to(table, held.shape), fullest, axis=1)[:, 0])
        for table in (keys, gradients)
    )
    most, beside, together = (
        np.rint(table.max(axis=1)) for table in (held, held + computing, held + computing + sent)
    )
    buckets = {
        "kv_bytes": kv_bytes,
        "kv_gradients_bytes": gradient_bytes,
        "activations_bytes": most - kv_bytes - gradient_bytes,
        "working_bytes": beside - most,
        "communication_bytes": together - beside,
    }
    return {name: table.astype(np.int64) for name, table in buckets.items()}


def _between(begins: Table, ends: Table) -> Table:
    """Return the bytes held during each action from those that begin before it or end after it."""
    held: Table = np.cumsum(begins - np.pad(ends, ((0, 0), (1, 0)))[:, :-1], axis=1)
    return held


def walk_of(candidate: Candidate) -> Walk:
    """Return the walk along the programs of a candidate whose units run whole."""
    return _walk(
        candidate.order,
        num_ranks=candidate.pipeline_parallel_degree,
        lengths=candidate.sequence_lengths[: _distinct_sequences(candidate)],
        num_virtual=candidate.virtual_stages,
        forwards_before_backward=candidate.forwards_before_backward,
        forward_only_stages=candidate.forward_only_stages,
        packed=bool(candidate.packed),
    )


@lru_cache(maxsize=64)
def _walk(order: str, *, packed: bool, **shape: Any) -> Walk:
    """Return the walk of all ranks, cached because it does not depend on the placement."""
    return Walk(generate(order, **shape), packed=packed)


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
