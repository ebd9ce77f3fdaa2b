"""The ``hybrid`` activation policy: keep what costs most to recompute, offload what overlaps.

A *piece* is one class of one subsequence on the stages of a rank that are alike. Its value is the
seconds that its recomputation takes for each byte that it occupies. Layer inputs cannot be
recomputed, so they are always kept. Of the other pieces, a rank keeps the most valuable ones that
fit: with causal attention these are the attention outputs of late subsequences, and linear tensors,
whose value is everywhere the same, only beside all attention outputs. The last piece that fits is
kept in part.

A copy that overlaps compute costs no time. If everything fits with copies, each subsequence
offloads as much as can be copied beside the next one, at the lowest common rate at which the rest
fits the device. Otherwise each offloads as much as the tier has room for, whatever its value, and
the device retains the most valuable pieces beside it. Slots for copies take memory themselves, so
offloading fewer classes is compared.

Copies may also be longer than what they overlap, if waiting for them costs less than recomputing.
Which wait is best depends on the whole step, so there are several :func:`choices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sppo.activations.placement import (
    ROW_ALIGNMENT,
    ActivationPlacement,
    Counts,
    prefix_rows,
)
from sppo.activations.policy_inputs import PolicyInputs
from sppo.activations.tensor_classes import ATTENTION, CLASSES, LINEAR, X_IN
from sppo.schedule.costs import Table

WAITS = (0.0, 0.5, 2.0, np.inf)
"""Waits for copies to compare, as shares of the forward that each copy overlaps."""
_BISECTIONS = 16
_ROUNDING_BYTES = 2
"""Margin in bytes, because each memory bucket is rounded to whole bytes separately."""


def choices(inputs: PolicyInputs) -> Iterator[ActivationPlacement]:
    """Yield the placements to compare, which differ in waits for copies; none if nothing fits.

    Longer waits are left out if nothing is recomputed or the tiers are full anyway.
    """
    for waits in WAITS if inputs.copy_bytes_per_s > 0 else WAITS[:1]:
        placers, kinds = _placers(inputs, waits=waits)
        found = [placer.placement() for placer in placers]
        fitting = [one for one in found if one is not None]
        if len(fitting) == len(found):
            yield _of_all_ranks([placers[kind].of_stages(fitting[kind]) for kind in kinds])
            waiting = zip(placers, fitting, strict=True)
            if not any(placer.waits_may_help(one) for placer, one in waiting):
                return


def least_memory(inputs: PolicyInputs) -> ActivationPlacement:
    """Return the placement that needs least device memory, however long copies take."""
    placers, kinds = _placers(inputs, waits=np.inf if inputs.copy_bytes_per_s > 0 else 0.0)
    found = [placer.of_stages(placer.least_memory()) for placer in placers]
    return _of_all_ranks([found[kind] for kind in kinds])


def _placers(inputs: PolicyInputs, *, waits: float) -> tuple[list[RankPlacer], list[int]]:
    """Return the placers of distinct ranks, and the index of the placer of each rank."""
    ranks = len(inputs.slots)
    _, kinds = inputs.kinds
    keys = [
        (*kinds[rank::ranks], inputs.device_bytes[rank], inputs.tier_bytes[rank], own)
        for rank, own in enumerate(inputs.slots)
    ]
    firsts = [keys.index(key) for key in dict.fromkeys(keys)]
    placers = [RankPlacer(inputs, rank, waits=waits) for rank in firsts]
    return placers, [firsts.index(keys.index(key)) for key in keys]


def _of_all_ranks(of_ranks: Sequence[ActivationPlacement]) -> ActivationPlacement:
    """Return the placement of all stages from the placement of each rank's stages."""
    tables = (np.stack(tables, axis=1) for tables in zip(*of_ranks, strict=True))
    return ActivationPlacement(*(table.reshape(-1, *table.shape[2:]) for table in tables))


def _last_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to `high` for which `holds` is true; it is of `low`."""
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _bisected(most: float, holds: Callable[[float], bool]) -> tuple[float, float]:
    """Return neighbouring numbers from 0 to `most`: `holds` is true of the lower one alone."""
    low, high = 0.0, most
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


class RankPlacer:
    """Placer of the activations of one rank, whose alike stages are placed alike.

    Placements and tables are those of one stage of each kind, [kinds, subsequences, ...].

    Args:
        inputs: Inputs of the policy for all ranks.
        rank: Pipeline rank.
        waits: Share of the forward that a copy overlaps for which it may be waited for as well.
    """

    def __init__(self, inputs: PolicyInputs, rank: int, *, waits: float) -> None:
        self._inputs, self._kinds = inputs.of_kinds(rank)
        self._tokens = inputs.tokens[:, None]
        self._most_copied = self._inputs.copied_bytes(waits)
        self._device_room, self._tier_room = (
            max(0.0, float(room[rank]) - _ROUNDING_BYTES)
            for room in (inputs.device_bytes, inputs.tier_bytes)
        )
        self._pieces, self._always = self._ordered_pieces()
        # Place of each piece among all pieces, -1 for inputs.
        self._places = np.full(self._inputs.recompute_s.shape, -1, dtype=np.int64)
        self._places.ravel()[self._pieces] = np.arange(len(self._pieces))
        self._everything = self._kept(len(self._pieces))

    def of_stages(self, placement: ActivationPlacement) -> ActivationPlacement:
        """Return the placement of all stages of the rank from that of one stage of each kind."""
        return placement.of_stages(self._kinds)

    def placement(self) -> ActivationPlacement | None:
        """Return the placement that recomputes least; None if nothing fits.

        Slots for copies take memory, too, so copies of nothing, of what is kept anyway, and of
        everything are compared.
        """
        everything = self._everything
        retained = self._placed(everything, None)
        if self._fits(retained):
            return retained
        offers: list[Callable[[Counts], Counts | None]] = [lambda kept: None]
        if self._most_copied.any():
            if self._fits(self._placed(everything, everything)):
                return self._with_least_copies()
            offers += [lambda kept: kept, lambda kept: everything]
        found = [self._with_most_kept(offered) for offered in offers]
        return min((one for one in found if one is not None), key=self._seconds, default=None)

    def _with_least_copies(self) -> ActivationPlacement:
        """Return the placement that keeps everything, with as little offloaded as necessary."""

        def at_rate(rate: float) -> ActivationPlacement:
            return self._placed(self._everything, self._everything, rate=rate)

        most = self._most_rate(self._wanted(self._everything))
        return at_rate(_bisected(most, lambda rate: not self._fits(at_rate(rate)))[1])

    def waits_may_help(self, found: ActivationPlacement) -> bool:
        """Return whether the tier has room for more than a placement copies."""
        wanted = self._wanted(self._everything)
        return bool(found.recomputed.any()) and self._in_tier(wanted) < self._tier_room

    def least_memory(self) -> ActivationPlacement:
        """Return the placement of least device memory: no piece kept beside the inputs."""
        kept = self._kept(self._always)
        return min((self._placed(kept, offered) for offered in (None, kept)), key=self._needed)

    def _ordered_pieces(self) -> tuple[Counts, int]:
        """Return the pieces, the most valuable first, and how many of them are always kept.

        Pieces are indices of flattened [kinds, N, 3]. Of equally valuable ones, those of late
        subsequences come first: they are held shortest. Those are always kept whose recomputation
        would free no memory.
        """
        inputs, seconds = self._inputs, self._inputs.recompute_s
        row_bytes = np.repeat(inputs.row_bytes[:, None], len(self._tokens), axis=1)
        row_bytes[:, :, ATTENTION] -= inputs.shared_input_bytes[:, None]
        held = self._tokens * row_bytes * inputs.in_flight[:, :, None]
        # Kernels are not equally fast for all lengths, which is no reason to favour some.
        most = np.maximum(held[:, :, LINEAR].sum(axis=1), 1.0)  # 0 if a stage has no backward
        of_kinds = (seconds[:, :, LINEAR].sum(axis=1) / most)[:, None]
        seconds[:, :, LINEAR] = of_kinds * held[:, :, LINEAR]
        value = np.full(held.shape, np.inf)
        np.divide(seconds, held, out=value, where=held > 0)
        pieces = np.arange(value.size).reshape(value.shape)[:, ::-1, 1:].ravel()
        values = value.ravel()[pieces]
        order = np.argsort(-values, kind="stable")
        return pieces[order], int(np.isinf(values).sum())

    def _kept(self, count: int, *, left: int = 0) -> Counts:
        """Return the rows of the inputs and of the most valuable pieces, [kinds, N, 3].

        Args:
            count: Number of pieces.
            left: Rows of the last piece that are left out.
        """
        found: Counts = np.where(self._places < count, self._tokens, 0)
        if left:
            piece = self._pieces[count - 1]
            found.ravel()[piece] = max(0, found.ravel()[piece] - left)
        return found

    def _with_most_kept(
        self, offered: Callable[[Counts], Counts | None]
    ) -> ActivationPlacement | None:
        """Return the placement that keeps as many pieces, and rows of the next, as fit; or None.

        Args:
            offered: Function that returns which rows may be offloaded beside rows that are kept.
        """

        def placed(count: int, cuts: int = 0) -> ActivationPlacement:
            kept = self._kept(count, left=cuts * ROW_ALIGNMENT)
            return self._placed(kept, offered(kept))

        if not self._fits(placed(self._always)):
            return None
        every = len(self._pieces)
        count = _last_true(self._always, every, lambda n: self._fits(placed(n)))
        if count == every or not self._inputs.allow_partial:
            return placed(count)
        tokens = int(self._tokens[self._pieces[count] // len(CLASSES) % len(self._tokens), 0])
        most = -(-tokens // ROW_ALIGNMENT)
        kept = _last_true(0, most - 1, lambda n: self._fits(placed(count + 1, most - n)))
        return placed(count + 1, most - kept)

    def _placed(
        self, kept: Counts, offered: Counts | None, *, rate: float | None = None
    ) -> ActivationPlacement:
        """Return the placement that keeps given rows, and what is offloaded of others.

        Args:
            kept: Rows that stay on the device or leave it, [kinds, N, 3].
            offered: Rows that may be offloaded, of the same shape; None for none. At most one class
                of a subsequence is cut: one that is kept in part is not offloaded.
            rate: Most bytes that are offloaded for each second of overlap; None for as many as the
                tier has room for.
        """
        if offered is None:
            return ActivationPlacement(kept, np.zeros_like(kept), self._tokens - kept)
        wanted = self._wanted(offered)
        rate = self._most_rate(wanted) if rate is None else rate
        row_bytes = np.repeat(self._inputs.row_bytes[:, None], len(self._tokens), axis=1)
        # Only layers without attention output save inputs that layers share.
        recomputes = kept[:, :, ATTENTION] < self._inputs.tokens
        row_bytes[:, :, X_IN] += self._inputs.shared_input_bytes[:, None] * recomputes
        in_part = (kept > 0) & (kept < self._tokens)
        offloaded = prefix_rows(
            np.minimum(wanted, rate * self._inputs.next_forward_s),
            rows=np.where(in_part, 0, offered),
            row_bytes=row_bytes,
            allow_partial=self._inputs.allow_partial & ~in_part.any(axis=2),
        )
        kept = np.maximum(kept, offloaded)
        return ActivationPlacement(kept - offloaded, offloaded, self._tokens - kept)

    def _wanted(self, offered: Counts) -> Table:
        """Return the most bytes of each subsequence to offload of given rows, [kinds, N]."""
        saved = self._inputs.saved_bytes(offered, recomputed=self._tokens - offered)
        wanted: Table = np.minimum(saved, self._most_copied)
        return wanted

    def _most_rate(self, wanted: Table) -> float:
        """Return the highest rate at which the tier has room for the wanted bytes."""
        rates = (wanted / self._inputs.next_forward_s).ravel()
        # Slightly above the largest rate, so that every subsequence offloads all that is wanted.
        if self._in_tier(wanted) <= self._tier_room:
            return float(rates.max()) * (1 + 1e-9)
        order = np.argsort(rates)
        held = np.repeat(self._inputs.sequences, wanted.shape[1])[order]
        whole = np.cumsum(wanted.ravel()[order] * held)
        # Bytes that subsequences which offload less than they want add for each unit of the rate.
        slopes = np.cumsum((self._inputs.next_forward_s.ravel()[order] * held)[::-1])[::-1]
        before = np.append(0.0, whole[:-1])
        first = int(np.argmax(before + rates[order] * slopes > self._tier_room))
        return float((self._tier_room - before[first]) / slopes[first])

    def _in_tier(self, offloaded: Table) -> float:
        """Return the bytes that given bytes of each subsequence, [kinds, N], take in the tier."""
        return float(offloaded.sum(axis=1) @ self._inputs.sequences)

    def _fits(self, placement: ActivationPlacement) -> bool:
        return self._needed(placement) <= self._device_room

    def _needed(self, placement: ActivationPlacement) -> float:
        """Return the device bytes at the worst moment: retained rows, and memory for copies."""
        return float(self._inputs.needed(placement)[0])

    def _seconds(self, placement: ActivationPlacement) -> float:
        """Return the seconds of recomputation."""
        return float((self._inputs.recompute_s * placement.recomputed / self._tokens).sum())
