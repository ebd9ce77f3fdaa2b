"""Units in flight: what each rank holds of units from their forward to their backward's end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sppo.activations.placement import Counts
from sppo.cost.candidate import Candidate
from sppo.cost.kv import kv_tokens
from sppo.cost.memory.walk import Walk, walk_of
from sppo.schedule.costs import Table


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """Bytes that are live only while a unit runs, in its F and in its B, [stages, N] each."""

    forward: Table
    backward: Table

    def __add__(self, other: Running) -> Running:
        """Return the sum of the bytes of both."""
        return Running(self.forward + other.forward, self.backward + other.backward)

    @property
    def most(self) -> Table:
        """Bytes of the unit that takes the most on each stage, [stages]."""
        most: Table = np.maximum(self.forward, self.backward).max(axis=1)
        return most


@dataclass(frozen=True)
class UnitsInFlight:
    """Units in flight on each pipeline rank of a candidate, and the peaks of their bytes."""

    candidate: Candidate

    def held(self, saved: Table, *, deferred: Table) -> Table:
        """Return the bytes of units while each action runs, [ranks, actions].

        Args:
            saved: Bytes of a unit from its forward to the end of its backward, [stages, N].
            deferred: Bytes of a unit from its backward to the end of its weight half if that is
                deferred, [stages, N].
        """
        walk = self._walk
        change = walk.of_actions(saved) * walk.begins
        if walk.defers.any():
            change += walk.of_actions(deferred) * walk.defers
        total = np.cumsum(change, axis=1)
        # Operands of a weight half are allocated in the backward before the saved tensors of the
        # unit are freed.
        held: Table = np.maximum(total, total - change)
        return held

    def running(self, running: Running) -> Table:
        """Return the bytes of the unit that runs during each action, [ranks, actions]."""
        walk = self._walk
        forward, backward = map(walk.of_actions, (running.forward, running.backward))
        return np.where(walk.is_forward, forward, backward * walk.is_backward)

    @cached_property
    def kv(self) -> Table:
        """Bytes of K and V while each action runs, [ranks, actions].

        K and V of a sequence are held on a stage from the first forward of the sequence to its last
        backward there, except between forward and backward where they are offloaded or recomputed.
        """
        candidate, spans = self.candidate, self._walk.spans
        held = self._sequence_bytes(kv_tokens(candidate)[0])
        placed = np.array(candidate.kv_of_stages)[spans.stages]
        stays, returns = placed == "retained", placed != "retained"
        back = np.where(placed == "offloaded", spans.return_begin, spans.first_backward)
        last = np.where(stays, spans.last_backward, spans.last_forward)
        return self._walk.during(
            (spans.first_forward, last, held),
            (back[returns], spans.last_backward[returns], held[returns]),
        )

    @cached_property
    def kv_gradients(self) -> Table:
        """Bytes of the gradients of K and V while each action runs, [ranks, actions].

        They are held on a stage from the first backward of a sequence there to its last.
        """
        spans, held = self._walk.spans, self._sequence_bytes(kv_tokens(self.candidate)[1])
        return self._walk.during((spans.first_backward, spans.last_backward, held))

    def peak(self, saved: Table, *, deferred: Table | None = None) -> Table:
        """Return the peak bytes of units that each rank holds, [ranks]; see :meth:`held`."""
        unsaved = np.zeros_like(saved)
        most: Table = self.held(saved, deferred=unsaved if deferred is None else deferred).max(
            axis=1
        )
        return most

    def counts(self, weights: Table) -> Counts:
        """Return how many units of each subsequence are held at the rank's peak, [stages, N].

        Args:
            weights: Bytes of a unit, by which the peak is found, [stages, N].
        """
        walk = self._walk
        fullest = np.cumsum(walk.of_actions(weights) * walk.begins, axis=1).argmax(axis=1)
        is_done = np.arange(walk.units.shape[1]) <= fullest[:, None]
        counts = np.zeros(weights.shape, dtype=np.int64)
        at = walk.stages[is_done], walk.units[is_done]
        np.add.at(counts, at, walk.begins[is_done].astype(np.int64))
        return counts

    @cached_property
    def sequences(self) -> Counts:
        """Most sequences of which each stage holds units at once, [stages]."""
        spans, num_stages = self._walk.spans, self.candidate.num_stages
        opens, closes = (
            moments.reshape(num_stages, -1) for moments in (spans.first_forward, spans.last_action)
        )
        order = np.argsort(np.hstack([opens, closes]), axis=1)
        most: Counts = np.cumsum(np.where(order < opens.shape[1], 1, -1), axis=1).max(axis=1)
        return most

    def _sequence_bytes(self, token_bytes: Table) -> Table:
        """Return the bytes of each sequence on each stage, [spans], from those of a token."""
        spans = self._walk.spans
        tokens = np.array([sum(own) for own in self.candidate.sequence_lengths], dtype=np.float64)
        held: Table = token_bytes[spans.stages] * tokens[spans.sequences]
        return held

    @cached_property
    def _walk(self) -> Walk:
        """Walk along the programs of all ranks."""
        return walk_of(self.candidate)
