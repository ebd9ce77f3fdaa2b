"""Peak memory of units in flight, which a rank holds from their forward to their backward's end.

The order of a rank's compute determines the units in flight, so the peaks of a candidate are exact
without simulation. A schedule of the SPPO family holds N + p - 1 - r units on rank r of p (Seq1F1B,
section 3): after j backwards of a sequence, the first N - j units of the sequence and the first
p - 1 - r + j units of the following sequences. In the looped order, all forwards of a group of
sequences come before its backwards in reverse order, so while a unit runs, all units up to it are
held; each group ends before the next one begins. For other schedules, in which a rank may have
several stages, the programs are walked action by action.

Legend: N subsequences of a sequence, p pipeline ranks, r one of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import Counts, alike_stages, first_of_each
from sppo.cost.candidate import Candidate
from sppo.schedule.costs import Table
from sppo.schedule.orders.names import LOOPED
from sppo.schedule.orders.rank_orders import ForwardsBeforeBackward, RankOrder, rank_orders
from sppo.schedule.orders.steps import sequence_groups

Indices = npt.NDArray[np.intp]

OVERLAPPING = ("sppo", "seq1f1b", "1f1b")
"""Schedules that hold N + p - 1 - r units on rank r; with MSP, the order of a rank's own units."""
_ONE_BEHIND_THE_OTHER = "sppo"
"""Schedule in which a single rank ends a sequence before it begins the next."""

_FIRST_RANK: Indices = np.zeros(1, dtype=np.intp)
_STAGE, _BEGIN, _END, _SEQUENCE = range(4)
"""Columns of all spans: stage of a rank, first event and last event; sequence, if it is there."""
_FIRST_BACKWARD, _LAST_FORWARD, _KV_RETURN, _LAST_BACKWARD = range(4, 8)
"""Further columns of :attr:`_HoldEvents.spans`."""


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


@dataclass(frozen=True, slots=True, eq=False)
class KVTokens:
    """Bytes per token of K and V, and of their gradients, on each stage, [stages] each."""

    kv: Table
    gradients: Table


@dataclass(frozen=True)
class UnitsInFlight:
    """Units in flight on each pipeline rank of a candidate, and the peaks of their bytes."""

    candidate: Candidate

    def peak(
        self,
        held: Table,
        *,
        deferred: Table | None = None,
        running: Running | None = None,
        kv: KVTokens | None = None,
    ) -> Table:
        """Return the peak bytes that each rank holds, [ranks].

        Args:
            held: Bytes of a unit from its forward to the end of its backward, [stages, N].
            deferred: Bytes of a unit from its backward to the end of its weight half if that is
                deferred, [stages, N]; None for 0.
            running: Bytes of a unit while it runs; None for 0.
            kv: Bytes per token of K, V and their gradients, for packed sequences only; None for 0.
        """
        assert kv is None or self.candidate.packed, "others have as much K and V all the time"
        if self._is_overlapping:
            moments = self._moments(held)
            if running is not None:
                return self._peak_beside(moments, held, running)
            most: Table = moments.max(axis=1)
            return most
        if self._is_looped:
            return self._looped_peak(held, running)
        peaks = []
        for events in self._events:
            at = events.stages, events.subsequences
            change = held[at] * events.held
            if deferred is not None:
                change = change + deferred[at] * events.deferred
            total = np.cumsum(change, axis=1)
            # Operands of a weight half, and gradients of K and V, are allocated in the backward
            # before the saved tensors of the unit are freed.
            during = np.maximum(total, total - change)
            if running is not None:
                total = np.maximum(
                    (total + running.forward[at]) * events.is_forward,
                    (during + running.backward[at]) * events.is_backward,
                )
            if kv is not None:
                held_beside = self._kv_at_events(events, kv)
                total = (during if running is None else total) + held_beside
            peaks.append(total.max(axis=1, initial=0.0))
        return np.concatenate(peaks)

    def counts(self, weights: Table) -> Counts:
        """Return how many units of each subsequence are held at the rank's peak, [stages, N].

        Args:
            weights: Bytes of a unit, by which the peak is found, [stages, N].
        """
        if self._is_overlapping:
            return self._counts_after(self._moments(weights).argmax(axis=1))
        if self._is_looped:
            return self._looped_counts(weights)
        counts = np.zeros(weights.shape, dtype=np.int64)
        for events in self._events:
            change = weights[events.stages, events.subsequences] * events.held
            ends = np.argmax(np.cumsum(change, axis=1), axis=1) + 1
            for stages, end in zip(events.stages, ends.tolist(), strict=True):
                np.add.at(counts, (stages[:end], events.subsequences[:end]), events.held[:end])
        return counts

    @cached_property
    def sequences(self) -> Counts:
        """Most sequences of which each stage holds units at once, [stages]."""
        if self.candidate.sequences == 1 and not self.candidate.packed:
            return np.ones(self.candidate.num_stages, dtype=np.int64)
        if self._is_looped:
            return np.full(self.candidate.num_stages, self.group_sequences)
        if not self._is_overlapping:
            found = np.zeros(self.candidate.num_stages, dtype=np.int64)
            for events in self._events:
                for place, spans in enumerate(events.spans_of_stages):
                    stages = events.ranks + place * self._shape[0]
                    found[stages] = _peak(spans, np.ones(len(spans)))
            return found
        # The first subsequence of a sequence is held as long as any other.
        first = np.zeros(self._shape)
        first[:, 0] = 1.0
        peaks: Counts = np.rint(self.peak(first)).astype(np.int64)
        return peaks

    def peak_of_kv(self, token_bytes: Table) -> Table:
        """Return the peak bytes of K and V on each rank, [ranks].

        K and V of a sequence are held on a stage from the first forward of the sequence to its last
        backward there, except between forward and backward where they are offloaded or recomputed.

        Args:
            token_bytes: Bytes of K and V per token on each stage, [stages].
        """
        candidate = self.candidate
        if candidate.packed:
            return self._packed_peak_of_kv(token_bytes)
        held = token_bytes * sum(candidate.lengths)
        if candidate.virtual_stages == 1:
            most: Table = held * self.sequences
            return most
        by_rank = held.reshape(-1, self._shape[0]).T
        if self._is_looped:
            count = len(candidate.lengths)
            spans = _looped_spans(count, self.group_sequences, candidate.virtual_stages)
            ranks, alike = self._distinct_ranks(held[:, None])
            spans = self._kv_spans(spans)
            peaks = [_peak(spans, by_rank[rank][spans[:, _STAGE]]) for rank in ranks]
            return np.array(peaks)[alike]
        peaks = []
        for events in self._events:
            spans = self._kv_spans(events.spans)
            peaks += [
                _peak(spans, by_rank[rank][spans[:, _STAGE]]) for rank in events.ranks.tolist()
            ]
        return np.array(peaks)

    def _packed_peak_of_kv(self, token_bytes: Table) -> Table:
        """Return the peak bytes of K and V of packed sequences on each rank, [ranks]."""
        by_rank = token_bytes.reshape(-1, self._shape[0]).T
        tokens = np.array([sequence.tokens for sequence in self.candidate.packed], dtype=float)
        peaks = []
        for events in self._events:
            spans = self._packed_kv_spans(events)
            held = tokens[spans[:, _SEQUENCE]]
            peaks += [_peak(spans, by_rank[rank][spans[:, _STAGE]] * held) for rank in events.ranks]
        return np.array(peaks)

    def _kv_at_events(self, events: _HoldEvents, kv: KVTokens) -> Table:
        """Return the bytes of K, V and their gradients at each event, [ranks, events]."""
        ranks, count = self._shape[0], len(events.subsequences)
        tokens = np.array([sequence.tokens for sequence in self.candidate.packed], dtype=float)
        of_gradients = events.spans[:, [_STAGE, _FIRST_BACKWARD, _LAST_BACKWARD, _SEQUENCE]]
        held_by = (self._packed_kv_spans(events), kv.kv), (of_gradients, kv.gradients)
        found = np.zeros((len(events.ranks), count + 1))
        for own, rank in zip(found, events.ranks.tolist(), strict=True):
            for spans, token_bytes in held_by:
                places, begins, lasts, sequences = spans.T
                held = token_bytes.reshape(-1, ranks)[places, rank] * tokens[sequences]
                np.add.at(own, begins, held)
                np.subtract.at(own, lasts + 1, held)
        bytes_held: Table = np.cumsum(found, axis=1)[:, :count]
        return bytes_held

    def _packed_kv_spans(self, events: _HoldEvents) -> Indices:
        """Return when K and V of packed sequences exist: (stage, first event, last, sequence)."""
        candidate, spans = self.candidate, events.spans
        degree = candidate.pipeline_parallel_degree
        count = int(spans[:, _STAGE].max()) + 1
        placements = np.array([candidate.kv_of_stage(place * degree) for place in range(count)])
        own = placements[spans[:, _STAGE]]
        back = np.where(own == "offloaded", spans[:, _KV_RETURN], spans[:, _FIRST_BACKWARD])
        whole = spans[:, [_STAGE, _BEGIN, _LAST_BACKWARD, _SEQUENCE]]
        before, after = spans[:, [_STAGE, _BEGIN, _LAST_FORWARD, _SEQUENCE]], whole.copy()
        after[:, _BEGIN] = back
        stays = own == "retained"
        return np.concatenate([whole[stays], before[~stays], after[~stays]])

    def _kv_spans(self, spans: Indices) -> Indices:
        """Return when K and V are on the device, from `spans` in which sequences are in flight."""
        candidate, count = self.candidate, len(self.candidate.lengths)
        turn = candidate.virtual_stages * self.group_sequences * count
        found = []
        for position, first, last in spans[:, [_STAGE, _BEGIN, _END]].tolist():
            placement = candidate.kv_of_stage(position * candidate.pipeline_parallel_degree)
            if placement == "retained":
                found.append((position, first, last))
                continue
            backward = last - count + 1
            back = max(turn, backward - count) if placement == "offloaded" else backward
            found += [(position, first, first + count - 1), (position, back, last)]
        return np.array(found, dtype=np.intp)

    @property
    def group_sequences(self) -> int:
        """Most sequences that pass a stage together before the next stage of its rank."""
        lengths = (self.candidate.lengths,) * self.candidate.sequences
        groups = sequence_groups(lengths, num_ranks=self.candidate.pipeline_parallel_degree)
        return len(groups[0])

    def _looped_peak(self, held: Table, running: Running | None) -> Table:
        """Return the peak bytes that each rank holds in the looped order, [ranks]."""
        tables = [held] if running is None else [held, running.forward, running.backward]
        ranks, alike = self._distinct_ranks(*tables)
        up_to = self._looped_totals(held, ranks)
        if running is None:
            most: Table = up_to[:, -1]
        else:
            beside = np.maximum(
                *(table.reshape(-1, *self._shape)[:, ranks] for table in tables[1:])
            )
            units = up_to.reshape(len(ranks), len(beside), -1, self._shape[1])
            most = (units + beside.transpose(1, 0, 2)[:, :, None]).max(axis=(1, 2, 3))
        return most[alike]

    def _looped_counts(self, weights: Table) -> Counts:
        """Return :meth:`counts` of the looped order, [stages, N]."""
        ranks, alike = self._distinct_ranks(weights)
        up_to = self._looped_totals(weights, ranks)
        is_held = np.arange(up_to.shape[1]) <= up_to.argmax(axis=1)[:, None]
        counts = is_held.reshape(len(ranks), -1, self.group_sequences, self._shape[1]).sum(axis=2)
        of_stages: Counts = counts[alike].transpose(1, 0, 2).reshape(weights.shape)
        return of_stages

    def _looped_totals(self, held: Table, ranks: list[int]) -> Table:
        """Return the bytes that `ranks` hold while each unit of a group runs.

        Args:
            held: Bytes of a unit, [stages, N].
            ranks: Indices of the ranks.

        Returns:
            Bytes, [ranks, units of a group on all stages of a rank in the order of forwards].
        """
        own = held.reshape(-1, *self._shape)[:, ranks].transpose(1, 0, 2)
        repeated = np.repeat(own[:, :, None], self.group_sequences, axis=2)
        totals: Table = np.cumsum(repeated.reshape(len(ranks), -1), axis=1)
        return totals

    def _distinct_ranks(self, *tables: Table) -> tuple[list[int], list[int]]:
        """Return the first rank of each kind, and the kind of each rank.

        Ranks are of the same kind if all rows of their stages are equal.

        Args:
            tables: Tables in which stages may differ, [stages, ...] each.
        """
        of_stages, num_ranks = alike_stages(*tables), self._shape[0]
        return first_of_each(tuple(of_stages[rank::num_ranks]) for rank in range(num_ranks))

    @property
    def _shape(self) -> tuple[int, int]:
        return self.candidate.pipeline_parallel_degree, len(self.candidate.lengths)

    @property
    def _is_overlapping(self) -> bool:
        return self.candidate.order in OVERLAPPING and not self.candidate.packed

    @property
    def _is_looped(self) -> bool:
        return self.candidate.order == LOOPED and not self.candidate.packed

    @cached_property
    def _ahead(self) -> Counts:
        """Units of later sequences in flight after each backward of a sequence, [stages, N+1]."""
        ranks, count = self._shape
        sequences = self.candidate.sequences
        if ranks == 1 and self.candidate.order == _ONE_BEHIND_THE_OTHER:
            sequences = 1
        ahead: Counts = (ranks - 1 - np.arange(ranks))[:, None] + np.arange(count + 1)
        return np.minimum(ahead, count * (sequences - 1))

    def _moments(self, weights: Table) -> Table:
        """Return the sums of weights held after each backward of a sequence, [stages, N+1]."""
        count = self._shape[1]
        before = np.pad(np.cumsum(weights, axis=1), ((0, 0), (1, 0)))
        held: Table = before[:, ::-1]
        if self.candidate.sequences == 1:
            return held
        whole, rest = np.divmod(self._ahead, count)
        held = held + whole * before[:, -1:]
        return held + np.take_along_axis(before, rest, axis=1)

    def _peak_beside(self, moments: Table, held: Table, running: Running) -> Table:
        """Return the peak bytes of held and running units together, [stages].

        While the first forwards of a sequence run, only the units before them are held. After that,
        each forward, and the backward after it, runs while the units after the previous backward
        are held.
        """
        count = self._shape[1]
        first = (np.cumsum(held, axis=1) + running.forward).max(axis=1)
        backward = (moments[:, :count] + running.backward[:, ::-1]).max(axis=1)
        most: Table = np.maximum(first, backward)
        if self.candidate.sequences > 1:
            ahead = self._ahead[:, :count]
            newest = np.take_along_axis(running.forward, (ahead - 1) % count, axis=1)
            # Units begun ahead of the first backward run one after another; the longest counts.
            longest = running.forward.max(axis=1)
            newest[:, 0] = np.where(ahead[:, 0] > 1, longest, newest[:, 0])
            forward = np.where(ahead > 0, moments[:, :count] + newest, 0.0)
            most = np.maximum(most, forward.max(axis=1))
        return most

    def _counts_after(self, done: npt.NDArray[np.intp]) -> Counts:
        """Return the units held of each subsequence after `done` backwards, [stages, N]."""
        count = self._shape[1]
        index = np.arange(count)
        ahead = np.take_along_axis(self._ahead, done[:, None], axis=1)
        whole, rest = np.divmod(ahead, count)
        counts: Counts = whole + (index < rest) + (index < count - done[:, None])
        return counts

    @property
    def _events(self) -> tuple[_HoldEvents, ...]:
        """Events of all ranks in the order of their programs."""
        candidate = self.candidate
        return _events_of_ranks(
            candidate.schedule,
            num_ranks=candidate.pipeline_parallel_degree,
            lengths=candidate.sequence_lengths,
            num_virtual=candidate.virtual_stages,
            forwards_before_backward=candidate.forwards_before_backward,
            packed=bool(candidate.packed),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _HoldEvents:
    """Events of ranks with equal programs: actions that run, and units whose holding changes.

    Attributes:
        stages: Stage of each event on each rank, [ranks, events].
        subsequences: Subsequence of each event, [events].
        held: 1 if holding begins with a forward, -1 if it ends with a backward, else 0, [events].
        deferred: 1 if holding operands of a deferred weight half begins with a backward, -1 if it
            ends with the weight half, else 0, [events].
        is_forward: 1 if the event is a forward, else 0, [events].
        is_backward: 1 if the event is a backward, else 0, [events].
        spans: Row for each sequence on each stage of a rank: position of the stage on its rank,
            first event, last event, sequence, first backward, last forward, the event before which
            copies of K and V begin to come back, last backward.
        ranks: Index of each rank, [ranks].
    """

    stages: Indices
    subsequences: Indices
    held: Counts
    deferred: Counts
    is_forward: Counts
    is_backward: Counts
    spans: Indices
    ranks: Indices

    @property
    def spans_of_stages(self) -> Iterator[Indices]:
        """Spans of each stage of a rank, numbered as if the stage were the first."""
        for place in range(int(self.spans[:, _STAGE].max()) + 1):
            own = self.spans[self.spans[:, _STAGE] == place].copy()
            own[:, _STAGE] = 0
            yield own

    def on(self, ranks: Indices, every: Indices) -> _HoldEvents:
        """Return the events of the first rank as events of `ranks`, which are some of `every`."""
        return replace(self, stages=ranks[:, None] + len(every) * self.stages, ranks=ranks)


@lru_cache(maxsize=16)
def _events_of_ranks(
    schedule: str,
    *,
    num_ranks: int,
    lengths: tuple[tuple[int, ...], ...],
    num_virtual: int,
    forwards_before_backward: ForwardsBeforeBackward,
    packed: bool,
) -> tuple[_HoldEvents, ...]:
    """Return the events of all ranks, cached because they do not depend on the placement.

    Args:
        schedule: Name of the schedule.
        num_ranks: Pipeline ranks.
        lengths: Tokens of each subsequence of each sequence.
        num_virtual: Stages of a rank.
        forwards_before_backward: Forwards that each rank begins before each backward; empty for
            those of the schedule.
        packed: Whether the subsequences of all sequences are numbered through.
    """
    orders = rank_orders(
        schedule,
        num_ranks=num_ranks,
        lengths=lengths,
        num_virtual=num_virtual,
        forwards_before_backward=forwards_before_backward,
    )
    firsts = [*accumulate(map(len, lengths), initial=0)][:-1] if packed else []
    ranks = np.arange(num_ranks)
    return tuple(
        _events(order, firsts).on(ranks[rank : rank + 1], ranks)
        for rank, order in enumerate(orders)
    )


def _events(order: RankOrder, firsts: Sequence[int]) -> _HoldEvents:
    """Return the events of a rank that runs `order`, with stages by their positions on the rank.

    Args:
        order: Order of the rank's compute.
        firsts: Index of the first subsequence of each sequence among all subsequences; empty if
            sequences are alike and share indices.
    """
    deferred = {step for kind, step in order if kind == "W"}
    rows = []
    spans: dict[tuple[int, int], list[int]] = {}
    forwards: dict[tuple[int, int], list[int]] = {}
    backwards: dict[tuple[int, int], list[int]] = {}
    for place, (kind, (virtual, (sequence, within))) in enumerate(order):
        index = within + (firsts[sequence] if firsts else 0)
        if kind == "F":
            rows.append((virtual, index, 1, 0, 1, 0))
            forwards.setdefault((virtual, sequence), []).append(place)
        elif kind == "B":
            rows.append((virtual, index, -1, int((virtual, (sequence, within)) in deferred), 0, 1))
            backwards.setdefault((virtual, sequence), []).append(place)
        else:
            rows.append((virtual, index, 0, -1, 0, 0))
        spans.setdefault((virtual, sequence), [place, place])[1] = place
    of_rank = sorted(chain.from_iterable(backwards.values()))
    table = np.array(
        [
            (*key[:1], *ends, *key[1:], *_turns(forwards[key], backwards[key], of_rank))
            for key, ends in spans.items()
        ],
        dtype=np.intp,
    )
    virtual_stages, indices, held, deferred_halves, is_forward, is_backward = (
        np.array(rows, dtype=np.int64).reshape(-1, 6).T
    )
    return _HoldEvents(
        virtual_stages[None],
        indices,
        held,
        deferred_halves,
        is_forward,
        is_backward,
        table,
        _FIRST_RANK,
    )


def _turns(
    forwards: Sequence[int], backwards: Sequence[int], of_rank: Sequence[int]
) -> tuple[int, int, int, int]:
    """Return the last four columns of :attr:`_HoldEvents.spans` for a sequence on a stage."""
    back = kv_return(forwards, of_rank, before=backwards[0])
    return backwards[0], forwards[-1], back, backwards[-1]


def kv_return(forwards: Sequence[int], backwards: Sequence[int], *, before: int) -> int:
    """Return the place in a rank's order before which offloaded K and V begin to come back.

    :func:`sppo.schedule.transfers.kv_placement.place_kv` spreads the H2D copies of a sequence over
    as many backwards of the rank as the sequence has units, directly before its own backwards.

    Args:
        forwards: Indices of the forwards of a sequence on a stage, ascending.
        backwards: Indices of all backwards of the rank, ascending.
        before: Place of the first backward of the sequence on the stage.
    """
    begin, end = bisect_right(backwards, forwards[-1]), bisect_left(backwards, before)
    return backwards[max(begin, end - len(forwards))]


def _looped_spans(num_subsequences: int, sequences: int, virtual_stages: int) -> Indices:
    """Return (stage, first event, last event) of each sequence of a group in the looped order."""
    count = sequences * num_subsequences
    first = np.arange(virtual_stages)[:, None] * count + np.arange(0, count, num_subsequences)
    last = 2 * virtual_stages * count - 1 - first[:, ::-1]
    places = np.repeat(np.arange(virtual_stages), sequences)
    return np.stack([places, first.ravel(), last.ravel()], axis=1)


def _peak(spans: Indices, held: Table) -> float:
    """Return the peak of bytes that spans (stage, first event, last event, ...) hold at once.

    Args:
        spans: Spans from their first to their last event, both inclusive.
        held: Bytes of each span.
    """
    order = np.argsort(np.concatenate([spans[:, _BEGIN], spans[:, _END]]), kind="stable")
    return float(np.cumsum(np.concatenate([held, -held])[order]).max(initial=0.0))
