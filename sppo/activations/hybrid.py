"""The ``hybrid`` activation policy: keep what costs most to recompute, offload what overlaps.

A *piece* is one class of one subsequence on the stages of a rank that are alike. Its value is the
seconds that its recomputation takes for each byte that it occupies. Layer inputs cannot be
recomputed, so they are always kept. Of the other pieces, a rank keeps the most valuable ones that
fit: with causal attention these are the attention outputs of late subsequences, and linear tensors,
whose value is everywhere the same, only beside all attention outputs. The last piece that fits is
kept in part.

A copy that overlaps compute costs no time, so each subsequence offloads of what it keeps as much as
can be copied beside the next one, at the lowest common rate at which the rest fits the device. What
could be copied for free but is less valuable than what the device retains is kept as well, as far
as the tier has room.

Copies may also be longer than what they overlap, if waiting for them costs less than recomputing.
Which wait is best depends on the whole step, so there are several :func:`choices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sppo.activations.placement import (
    ROW_ALIGNMENT,
    ActivationPlacement,
    Counts,
    alike_stages,
    first_of_each,
    prefix_rows,
    saved_bytes,
)
from sppo.activations.policy_inputs import CopySlots, PolicyInputs
from sppo.activations.tensor_classes import ATTENTION, CLASSES, LINEAR, X_IN
from sppo.schedule.costs import Table

WAITS = (0.0, 0.5, 2.0, np.inf)
"""Waits for copies to compare, as shares of the forward that each copy overlaps."""
_BISECTIONS = 16
_RATES = 16
"""Number of rates among which the placement of least memory is found."""
_ROUNDING_BYTES = 2
"""Margin in bytes, because each memory bucket is rounded to whole bytes separately."""


@dataclass(frozen=True, slots=True, eq=False)
class KindRows:
    """Rows of one placement of a rank, [kinds, subsequences, 3] each; the rest is recomputed."""

    kept: Counts
    """Rows that are retained or offloaded."""
    offloaded: Counts

    @property
    def retained(self) -> Counts:
        """Rows that stay on the device."""
        return self.kept - self.offloaded


@dataclass(frozen=True, eq=False)
class RankProblem:
    """Placement of the activations of one rank, whose alike stages are placed alike.

    Attributes:
        tokens: Tokens of every subsequence, [N].
        stages: Number of stages of each kind, [kinds].
        row_bytes: Bytes of one row of each class, [kinds, 3].
        shared_input_bytes: See :class:`sppo.activations.policy_inputs.PolicyInputs`, [kinds].
        in_flight: Number of times that a subsequence is held at once, [kinds, N].
        sequences: Number of sequences in the next tier at once, [kinds].
        next_forward_s: Seconds that a copy may overlap, [kinds, N].
        most_offloaded: Most bytes of a subsequence to offload, [kinds, N].
        recompute_s: Seconds to recompute each class of a subsequence, [kinds, N, 3].
        device_bytes: Room on the device.
        tier_bytes: Room in the next tier.
        slots: Memory for copies.
        allow_partial: Whether a class may be cut.
    """

    tokens: Counts
    stages: Counts
    row_bytes: Table
    shared_input_bytes: Table
    in_flight: Counts
    sequences: Counts
    next_forward_s: Table
    most_offloaded: Table
    recompute_s: Table
    device_bytes: float
    tier_bytes: float
    slots: CopySlots
    allow_partial: bool = True

    def placement(self) -> KindRows | None:
        """Return the placement that recomputes least; None if nothing fits."""
        everything = self._fitting(self.kept(len(self._pieces)))
        if everything is not None:
            return self._with_least_copies(everything)
        if not self._fits(self.kept(self._always)):
            return None
        count = _last_true(self._always, len(self._pieces), lambda n: self._fits(self.kept(n)))
        found = self._fitting(self._with_part(count))
        assert found is not None, "it was found to fit"
        free = self._with_free_copies(count)
        if free is not None and self._recompute_s(free.kept) < self._recompute_s(found.kept):
            return free
        return found

    def waits_may_help(self, found: KindRows) -> bool:
        """Return whether the tier has room for more than a placement copies."""
        wanted = self._most_wanted(found.kept)
        recomputes = bool((found.kept < self.tokens[:, None]).any())
        return recomputes and self._in_tier(wanted) < self._tier_room

    def least_memory(self) -> KindRows:
        """Return the placement of least device memory: no piece kept beside the inputs.

        Offloaded rows need slots for their copies, which may take more memory than offloading
        frees.
        """
        kept = self.kept(self._always)
        wanted = self._most_wanted(kept)
        most = self._most_rate(wanted)
        rows = [
            KindRows(kept, self._rows(np.minimum(wanted, rate * self.next_forward_s), kept))
            for rate in most * np.arange(_RATES + 1) / _RATES
        ]
        return min(rows, key=self._needed)

    def kept(self, count: int) -> Counts:
        """Return the rows of the inputs and of the most valuable pieces, [kinds, N, 3]."""
        found: Counts = np.where(self._places < count, self.tokens[:, None], 0)
        return found

    @cached_property
    def _pieces(self) -> Counts:
        """Pieces, the most valuable first, as indices of flattened [kinds, N, 3]."""
        return self._ordered[0]

    @property
    def _always(self) -> int:
        """Number of pieces whose recomputation would free no memory."""
        return self._ordered[1]

    @cached_property
    def _ordered(self) -> tuple[Counts, int]:
        """Pieces, the most valuable first; and how many of them are always kept.

        Of equally valuable ones, those of late subsequences come first: they are held shortest.
        """
        row_bytes = np.repeat(self.row_bytes[:, None], len(self.tokens), axis=1)
        row_bytes[:, :, ATTENTION] -= self.shared_input_bytes[:, None]
        held = self.tokens[:, None] * row_bytes * self.in_flight[:, :, None]
        seconds = self.recompute_s.copy()
        # Kernels are not equally fast for all lengths, which is no reason to favour some.
        of_kinds = (seconds[:, :, LINEAR].sum(axis=1) / held[:, :, LINEAR].sum(axis=1))[:, None]
        seconds[:, :, LINEAR] = of_kinds * held[:, :, LINEAR]
        value = np.full(held.shape, np.inf)
        np.divide(seconds, held, out=value, where=held > 0)
        pieces = np.arange(value.size).reshape(value.shape)[:, ::-1, 1:].ravel()
        values = value.ravel()[pieces]
        order = np.argsort(-values, kind="stable")
        return pieces[order], int(np.isinf(values).sum())

    @cached_property
    def _places(self) -> Counts:
        """Place of each piece among all pieces, -1 for inputs, [kinds, N, 3]."""
        places = np.full(self.recompute_s.shape, -1, dtype=np.int64)
        places.ravel()[self._pieces] = np.arange(len(self._pieces))
        return places

    def _with_part(self, count: int) -> Counts:
        """Return the rows of the first pieces, and as many of the next piece as fit."""
        kept = self.kept(count)
        if count == len(self._pieces) or not self.allow_partial:
            return kept
        piece = self._pieces[count]
        tokens = int(self.tokens[piece // len(CLASSES) % len(self.tokens)])

        def partly(cuts: int) -> Counts:
            rows = kept.copy()
            rows.ravel()[piece] = max(0, tokens - (most - cuts) * ROW_ALIGNMENT)
            return rows

        most = -(-tokens // ROW_ALIGNMENT)
        return partly(_last_true(0, most - 1, lambda cuts: self._fits(partly(cuts))))

    def _with_free_copies(self, count: int) -> KindRows | None:
        """Return the placement that also keeps less valuable pieces which are copied for free.

        Args:
            count: Number of pieces that fit if they alone are copied.

        Returns:
            None if the tier is full.
        """

        def sent(pieces: int) -> Counts:
            kept = self.kept(pieces)
            return self._rows(self._most_wanted(kept), kept)

        def fits_tier(pieces: int) -> bool:
            return self._in_tier(self._saved(sent(pieces), self.kept(pieces))) <= self._tier_room

        if not self.allow_partial or not fits_tier(count):
            return None
        copied = sent(_last_true(count, len(self._pieces), fits_tier))

        def beside(pieces: int) -> KindRows:
            return KindRows(np.maximum(self.kept(pieces), copied), copied)

        def fits(pieces: int) -> bool:
            return self._fits_device(beside(pieces))

        return beside(_last_true(self._always, count, fits)) if fits(self._always) else None

    def _fits(self, kept: Counts) -> bool:
        return self._fitting(kept) is not None

    def _fitting(self, kept: Counts) -> KindRows | None:
        """Return given rows, with as much offloaded as possible if they do not fit otherwise."""
        retained = KindRows(kept, np.zeros_like(kept))
        if self._fits_device(retained):
            return retained
        copied = self._with_most_copies(kept)
        return copied if self._fits_device(copied) else None

    def _with_most_copies(self, kept: Counts) -> KindRows:
        """Return given rows with as much offloaded as may be copied and fits the tier."""
        wanted = self._most_wanted(kept)
        return self._at_rate(kept, wanted, self._most_rate(wanted))

    def _with_least_copies(self, rows: KindRows) -> KindRows:
        """Return rows that fit with as little of them offloaded as necessary."""
        if not rows.offloaded.any():
            return rows
        wanted = self._most_wanted(rows.kept)
        low, high = 0.0, self._most_rate(wanted)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if self._fits_device(self._at_rate(rows.kept, wanted, middle)):
                high = middle
            else:
                low = middle
        return self._at_rate(rows.kept, wanted, high)

    def _most_wanted(self, kept: Counts) -> Table:
        """Return the most bytes of each subsequence to offload of given rows, [kinds, N]."""
        wanted: Table = np.minimum(self._saved(kept, kept), self.most_offloaded)
        return wanted

    def _at_rate(self, kept: Counts, wanted: Table, rate: float) -> KindRows:
        """Return given rows with up to `rate` bytes offloaded for each second of overlap."""
        return KindRows(kept, self._rows(np.minimum(wanted, rate * self.next_forward_s), kept))

    def _most_rate(self, wanted: Table) -> float:
        """Return the highest rate at which the tier has room for the wanted bytes."""
        rates = wanted / self.next_forward_s
        # Slightly above the largest rate, so that every subsequence offloads all that is wanted.
        if self._in_tier(wanted) <= self._tier_room:
            return float(rates.max()) * (1 + 1e-9)
        times = (self.stages * self.sequences)[:, None]
        order = np.argsort(rates, axis=None)
        # At the rate of each subsequence: bytes of those of lower rates, seconds of the others.
        whole = np.cumsum((wanted * times).ravel()[order])
        seconds = np.cumsum((self.next_forward_s * times).ravel()[order])
        taken = whole + (seconds[-1] - seconds) * rates.ravel()[order]
        place = int(np.searchsorted(taken, self._tier_room))
        before = whole[place - 1] if place else 0.0
        left_s = seconds[-1] - (seconds[place - 1] if place else 0.0)
        return float((self._tier_room - before) / left_s)

    @property
    def _tier_room(self) -> float:
        return max(0.0, self.tier_bytes - _ROUNDING_BYTES)

    def _in_tier(self, offloaded: Table) -> float:
        """Return the bytes that given bytes of each subsequence, [kinds, N], take in the tier."""
        return float(offloaded.sum(axis=1) @ (self.stages * self.sequences))

    def _rows(self, wanted: Table, kept: Counts) -> Counts:
        """Return the kept rows that make up at most the wanted bytes, [kinds, N, 3].

        At most one class of a subsequence is cut: a class that is kept in part stays on the device,
        and then no other is cut.
        """
        row_bytes = np.repeat(self.row_bytes[:, None], len(self.tokens), axis=1)
        row_bytes[:, :, X_IN] += self._more_input_bytes(kept)
        in_part = (kept > 0) & (kept < self.tokens[:, None])
        return prefix_rows(
            wanted,
            rows=np.where(in_part, 0, kept),
            row_bytes=row_bytes,
            allow_partial=self.allow_partial & ~in_part.any(axis=2),
        )

    def _more_input_bytes(self, kept: Counts) -> Table:
        """Return the bytes of a row's inputs that only layers without attention output save."""
        found: Table = self.shared_input_bytes[:, None] * (kept[:, :, ATTENTION] < self.tokens)
        return found

    def _saved(self, rows: Counts, kept: Counts) -> Table:
        """Return the bytes of some of the kept rows of each subsequence, [kinds, N]."""
        return saved_bytes(
            rows,
            recomputed=self.tokens[:, None] - kept,
            row_bytes=self.row_bytes,
            shared_input_bytes=self.shared_input_bytes,
        )

    def _fits_device(self, rows: KindRows) -> bool:
        return self._needed(rows) <= self.device_bytes - _ROUNDING_BYTES

    def _needed(self, rows: KindRows) -> float:
        """Return the device bytes at the worst moment: retained rows, and memory for copies."""
        held = (self._saved(rows.retained, rows.kept) * self.in_flight).sum(axis=1) @ self.stages
        placement = ActivationPlacement(
            rows.retained, rows.offloaded, self.tokens[:, None] - rows.kept
        )
        return float(held) + self.slots.reserved(placement)

    def _recompute_s(self, kept: Counts) -> float:
        """Return the seconds of recomputation."""
        shares = (self.tokens[:, None] - kept) / self.tokens[:, None]
        return float((self.recompute_s * shares).sum(axis=(1, 2)) @ self.stages)


def choices(inputs: PolicyInputs) -> Iterator[ActivationPlacement]:
    """Yield the placements to compare, which differ in waits for copies; none if nothing fits.

    Longer waits are left out if nothing is recomputed or the tiers are full anyway.
    """
    for waits in WAITS if inputs.copy_bytes_per_s > 0 else WAITS[:1]:
        ranks = _Ranks(inputs, waits=waits)
        placements = {key: problem.placement() for key, problem in ranks.problems.items()}
        fitting = {key: rows for key, rows in placements.items() if rows is not None}
        if len(fitting) == len(placements):
            yield ranks.stacked(fitting)
            if not any(ranks.problems[key].waits_may_help(rows) for key, rows in fitting.items()):
                return


def least_memory(inputs: PolicyInputs) -> ActivationPlacement:
    """Return the placement that needs least device memory, however long copies take."""
    ranks = _Ranks(inputs, waits=np.inf if inputs.copy_bytes_per_s > 0 else 0.0)
    return ranks.stacked({key: one.least_memory() for key, one in ranks.problems.items()})


def _last_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to `high` for which `holds` is true; it is of `low`."""
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class _Ranks:
    """Distinct ranks of a candidate, and the kinds of their stages.

    Args:
        inputs: Inputs of the policy.
        waits: Share of the forward that a copy overlaps for which it may be waited for as well.
    """

    def __init__(self, inputs: PolicyInputs, *, waits: float) -> None:
        self._inputs = inputs
        self._alike = alike_stages(
            *(inputs.row_bytes, inputs.shared_input_bytes, inputs.in_flight, inputs.sequences),
            *(inputs.next_forward_s, inputs.hidden_bytes, inputs.may_offload),
        )
        ranks = len(inputs.device_bytes)
        keys = [
            (
                *self._alike[rank::ranks],
                inputs.device_bytes[rank],
                inputs.tier_bytes[rank],
                inputs.slots[rank],
            )
            for rank in range(ranks)
        ]
        self._firsts, self._kinds = first_of_each(keys)
        self.problems = {rank: self._problem(rank, waits) for rank in self._firsts}
        """Problem of the first rank of each kind."""

    def stacked(self, found: dict[int, KindRows]) -> ActivationPlacement:
        """Return the placement of all stages from that of the first rank of each kind."""
        inputs, ranks = self._inputs, len(self._kinds)
        shape = len(inputs.row_bytes), len(inputs.tokens), len(CLASSES)
        kept, offloaded = np.zeros((2, *shape), dtype=np.int64)
        for rank, kind in enumerate(self._kinds):
            first = self._firsts[kind]
            _, kinds = first_of_each(self._alike[first::ranks])
            kept[rank::ranks] = found[first].kept[kinds]
            offloaded[rank::ranks] = found[first].offloaded[kinds]
        return ActivationPlacement(kept - offloaded, offloaded, inputs.tokens[:, None] - kept)

    def _problem(self, rank: int, waits: float) -> RankProblem:
        inputs, own = self._inputs, slice(rank, None, len(self._inputs.device_bytes))
        firsts, kinds = first_of_each(self._alike[own])
        stages = np.arange(len(inputs.row_bytes))[own][firsts]
        recompute_s = np.zeros((len(stages), len(inputs.tokens), len(CLASSES)))
        recompute_s[:, :, ATTENTION] = inputs.attention_recompute_s[stages]
        recompute_s[:, :, LINEAR] = inputs.linear_recompute_s[stages]
        return RankProblem(
            tokens=inputs.tokens,
            stages=np.bincount(kinds),
            row_bytes=inputs.row_bytes[stages],
            shared_input_bytes=inputs.shared_input_bytes[stages],
            in_flight=inputs.in_flight[stages],
            sequences=inputs.sequences[stages],
            next_forward_s=inputs.next_forward_s[stages],
            most_offloaded=inputs.copied_bytes(waits)[stages],
            recompute_s=recompute_s,
            device_bytes=float(inputs.device_bytes[rank]),
            tier_bytes=float(inputs.tier_bytes[rank]),
            slots=inputs.slots[rank],
            allow_partial=inputs.allow_partial,
        )
