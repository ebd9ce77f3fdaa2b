"""What a stage holds at once: units between their forward and the end of their backward.

Only the order of a rank's compute decides that, no time, so peaks of a candidate are exact before
anything is simulated. A schedule of the SPPO family holds N + p - 1 - r units on rank r of p
(Seq1F1B, section 3): after j backwards of a sequence its first N - j units, and the first p - 1 - r
+ j of the sequences that follow it. Other schedules are walked along their programs.

Legend: N subsequences of a sequence, p pipeline ranks, r one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import Counts
from sppo.cost.candidate import Candidate
from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.costs import Table
from sppo.schedule.generators import generate
from sppo.schedule.in_flight import sequences_in_flight

OVERLAPPING = ("sppo", "sppo_msp", "seq1f1b", "1f1b")
"""Schedules that hold N + p - 1 - r units on rank r; of MSP's the units that a rank owns."""
_ONE_BEHIND_THE_OTHER = ("sppo", "sppo_msp")
"""Schedules in which a single rank ends a sequence before it begins the next."""


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """What runs on a stage beside what it holds, [stages, N]: bytes of a unit's F and of its B."""

    forward: Table
    backward: Table

    def __add__(self, other: Running) -> Running:
        """Both at once."""
        return Running(self.forward + other.forward, self.backward + other.backward)

    @property
    def most(self) -> Table:
        """Of the unit that takes most, [stages]."""
        most: Table = np.maximum(self.forward, self.backward).max(axis=1)
        return most


@dataclass(frozen=True)
class UnitsInFlight:
    """Units that each stage of a candidate holds at once."""

    candidate: Candidate

    def peak(
        self, held: Table, *, deferred: Table | None = None, running: Running | None = None
    ) -> Table:
        """Return the most bytes that each stage holds, [stages].

        Args:
            held: of a unit from its forward to the end of its backward, [stages, N].
            deferred: of a unit from its backward to the end of its weight half, where that is
                deferred, [stages, N].
            running: of a unit while it runs; None counts what is held alone.
        """
        if self._is_overlapping:
            moments = self._moments(held)
            if running is not None:
                return self._peak_beside(moments, held, running)
            most: Table = moments.max(axis=1)
            return most
        peaks = []
        for stage, events in enumerate(self._events):
            units = events.subsequences
            change = held[stage][units] * events.held
            if deferred is not None:
                change = change + deferred[stage][units] * events.deferred
            total = np.cumsum(change)
            if running is not None:
                # Operands of a weight half come while what backward ends to hold goes.
                during = np.maximum(total, total - change)
                total = np.maximum(
                    (total + running.forward[stage][units]) * events.is_forward,
                    (during + running.backward[stage][units]) * events.is_backward,
                )
            peaks.append(total.max(initial=0.0))
        return np.array(peaks)

    def counts(self, weights: Table) -> Counts:
        """Return how often each subsequence is held when what is held weighs most, [stages, N].

        Args:
            weights: of a unit, [stages, N].
        """
        if self._is_overlapping:
            return self._counts_after(self._moments(weights).argmax(axis=1))
        counts = np.zeros(weights.shape, dtype=np.int64)
        for stage, events in enumerate(self._events):
            change = weights[stage][events.subsequences] * events.held
            end = int(np.argmax(np.cumsum(change))) + 1
            np.add.at(counts[stage], events.subsequences[:end], events.held[:end])
        return counts

    @cached_property
    def sequences(self) -> Counts:
        """Sequences of which each stage holds anything at once, at most, [stages]."""
        if not self._is_overlapping:
            return np.array([sequences_in_flight(program) for program in self._programs])
        # The first subsequence of a sequence is held as long as any other.
        first = np.zeros(self._shape)
        first[:, 0] = 1.0
        peaks: Counts = np.rint(self.peak(first)).astype(np.int64)
        return peaks

    @property
    def _shape(self) -> tuple[int, int]:
        return self.candidate.pipeline_parallel_degree, len(self.candidate.lengths)

    @property
    def _is_overlapping(self) -> bool:
        return self.candidate.schedule in OVERLAPPING

    @cached_property
    def _ahead(self) -> Counts:
        """Units of following sequences begun after each backward of a sequence, [stages, N+1]."""
        ranks, count = self._shape
        sequences = self.candidate.sequences
        if ranks == 1 and self.candidate.schedule in _ONE_BEHIND_THE_OTHER:
            sequences = 1
        ahead: Counts = (ranks - 1 - np.arange(ranks))[:, None] + np.arange(count + 1)
        return np.minimum(ahead, count * (sequences - 1))

    def _moments(self, weights: Table) -> Table:
        """What is held after each backward of a sequence, [stages, N+1]."""
        count = self._shape[1]
        before = np.pad(np.cumsum(weights, axis=1), ((0, 0), (1, 0)))
        held: Table = before[:, ::-1]
        if self.candidate.sequences == 1:
            return held
        whole, rest = np.divmod(self._ahead, count)
        held = held + whole * before[:, -1:]
        return held + np.take_along_axis(before, rest, axis=1)

    def _peak_beside(self, moments: Table, held: Table, running: Running) -> Table:
        """Return the most of what is held and what runs, [stages].

        A sequence's first forwards run while only those before them are held. From then on a
        forward runs while all is held that is held after the backward before it, and so does the
        backward behind it.
        """
        count = self._shape[1]
        first = (np.cumsum(held, axis=1) + running.forward).max(axis=1)
        backward = (moments[:, :count] + running.backward[:, ::-1]).max(axis=1)
        most: Table = np.maximum(first, backward)
        if self.candidate.sequences > 1:
            ahead = self._ahead[:, :count]
            newest = np.take_along_axis(running.forward, (ahead - 1) % count, axis=1)
            # Those that are ahead before the first backward ran one after the other.
            longest = running.forward.max(axis=1)
            newest[:, 0] = np.where(ahead[:, 0] > 1, longest, newest[:, 0])
            forward = np.where(ahead > 0, moments[:, :count] + newest, 0.0)
            most = np.maximum(most, forward.max(axis=1))
        return most

    def _counts_after(self, done: npt.NDArray[np.intp]) -> Counts:
        """How often each subsequence is held after so many backwards of each stage, [stages, N]."""
        count = self._shape[1]
        index = np.arange(count)
        ahead = np.take_along_axis(self._ahead, done[:, None], axis=1)
        whole, rest = np.divmod(ahead, count)
        counts: Counts = whole + (index < rest) + (index < count - done[:, None])
        return counts

    @cached_property
    def _programs(self) -> tuple[tuple[Action, ...], ...]:
        candidate = self.candidate
        schedule = generate(
            candidate.schedule,
            num_ranks=candidate.pipeline_parallel_degree,
            lengths=(candidate.lengths,) * candidate.sequences,
        )
        return schedule.programs

    @cached_property
    def _events(self) -> tuple[_Events, ...]:
        """What each stage begins and ends to hold, in the order of its program."""
        return tuple(_events(program) for program in self._programs)


@dataclass(frozen=True, slots=True, eq=False)
class _Events:
    """What one stage begins (1) or ends (-1) to hold, in program order, and what runs then."""

    subsequences: npt.NDArray[np.intp]
    held: Counts
    deferred: Counts
    is_forward: Counts
    is_backward: Counts


def _events(program: tuple[Action, ...]) -> _Events:
    deferred = {action.unit for action in program if action.kind is ActionKind.W}
    rows = []
    for action in program:
        index = action.subsequence
        if action.kind is ActionKind.F:
            rows.append((index, 1, 0, 1, 0))
        elif action.kind is ActionKind.B:
            rows.append((index, -1, int(action.unit in deferred), 0, 1))
        elif action.kind is ActionKind.W:
            rows.append((index, 0, -1, 0, 0))
    return _Events(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)
