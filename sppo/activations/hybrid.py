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

import numpy as np

from sppo.activations.placement import (
    ROW_ALIGNMENT,
    ActivationPlacement,
    Counts,
    prefix_rows,
    saved_bytes,
)
from sppo.activations.policy_inputs import PolicyInputs
from sppo.activations.tensor_classes import ATTENTION, CLASSES, LINEAR, X_IN
from sppo.schedule.costs import Table

WAITS = (0.0, 0.5, 2.0, np.inf)
"""Waits for copies to compare, as shares of the forward that each copy overlaps."""
_BISECTIONS = 16
_RATES = 16
"""Number of rates among which the placement of least memory is found."""
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
    placers = [RankPlacer(inputs.of_rank(rank), waits=waits) for rank in firsts]
    return placers, [firsts.index(keys.index(key)) for key in keys]


def _of_all_ranks(of_ranks: list[ActivationPlacement]) -> ActivationPlacement:
    """Return the placement of all stages from the placement of each rank's stages."""
    names = "retained", "offloaded", "recomputed"
    tables = (np.stack([getattr(own, name) for own in of_ranks], axis=1) for name in names)
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
        inputs: Inputs of the policy for the stages of the rank.
        waits: Share of the forward that a copy overlaps for which it may be waited for as well.
    """

    def __init__(self, inputs: PolicyInputs, *, waits: float) -> None:
        firsts, self._kinds = inputs.kinds
        self._inputs = inputs = inputs.of_stages(firsts)
        self._stages = np.bincount(self._kinds)
        self._tokens = inputs.tokens[:, None]
        self._most_offloaded = inputs.copied_bytes(waits)
        self._tier_room = max(0.0, float(inputs.tier_bytes[0]) - _ROUNDING_BYTES)
        attention_s, linear_s = inputs.attention_recompute_s, inputs.linear_recompute_s
        self._recompute_s = np.stack([np.zeros_like(linear_s), attention_s, linear_s], axis=-1)
        self._pieces, self._always = self._ordered_pieces()
        # Place of each piece among all pieces, -1 for inputs.
        self._places = np.full(self._recompute_s.shape, -1, dtype=np.int64)
        self._places.ravel()[self._pieces] = np.arange(len(self._pieces))

    def of_stages(self, placement: ActivationPlacement) -> ActivationPlacement:
        """Return the placement of all stages of the rank from that of one stage of each kind."""
        return placement.of_stages(self._kinds)

    def placement(self) -> ActivationPlacement | None:
        """Return the placement that recomputes least; None if nothing fits."""
        everything = self._fitting(self._kept(len(self._pieces)))
        if everything is not None:
            return self._with_least_copies(everything)
        if not self._fits(self._kept(self._always)):
            return None
        count = _last_true(self._always, len(self._pieces), lambda n: self._fits(self._kept(n)))
        found = self._fitting(self._with_part(count))
        assert found is not None, "it was found to fit"
        free = self._with_free_copies(count)
        if free is not None and self._seconds(free) < self._seconds(found):
            return free
        return found

    def waits_may_help(self, found: ActivationPlacement) -> bool:
        """Return whether the tier has room for more than a placement copies."""
        wanted = self._most_wanted(found.retained + found.offloaded)
        return bool(found.recomputed.any()) and self._in_tier(wanted) < self._tier_room

    def least_memory(self) -> ActivationPlacement:
        """Return the placement of least device memory: no piece kept beside the inputs.

        Offloaded rows need slots for their copies, which may take more memory than offloading
        frees.
        """
        kept = self._kept(self._always)
        wanted = self._most_wanted(kept)
        rates = self._most_rate(wanted) * np.arange(_RATES + 1) / _RATES
        return min((self._at_rate(kept, wanted, rate) for rate in rates), key=self._needed)

    def _ordered_pieces(self) -> tuple[Counts, int]:
        """Return the pieces, the most valuable first, and how many of them are always kept.

        Pieces are indices of flattened [kinds, N, 3]. Of equally valuable ones, those of late
        subsequences come first: they are held shortest. Those are always kept whose recomputation
        would free no memory.
        """
        inputs = self._inputs
        row_bytes = np.repeat(inputs.row_bytes[:, None], len(self._tokens), axis=1)
        row_bytes[:, :, ATTENTION] -= inputs.shared_input_bytes[:, None]
        held = self._tokens * row_bytes * inputs.in_flight[:, :, None]
        seconds = self._recompute_s.copy()
        # Kernels are not equally fast for all lengths, which is no reason to favour some.
        of_kinds = (seconds[:, :, LINEAR].sum(axis=1) / held[:, :, LINEAR].sum(axis=1))[:, None]
        seconds[:, :, LINEAR] = of_kinds * held[:, :, LINEAR]
        value = np.full(held.shape, np.inf)
        np.divide(seconds, held, out=value, where=held > 0)
        pieces = np.arange(value.size).reshape(value.shape)[:, ::-1, 1:].ravel()
        values = value.ravel()[pieces]
        order = np.argsort(-values, kind="stable")
        return pieces[order], int(np.isinf(values).sum())

    def _kept(self, count: int) -> Counts:
        """Return the rows of the inputs and of the most valuable pieces, [kinds, N, 3]."""
        found: Counts = np.where(self._places < count, self._tokens, 0)
        return found

    def _with_part(self, count: int) -> Counts:
        """Return the rows of the first pieces, and as many of the next piece as fit."""
        kept = self._kept(count)
        if count == len(self._pieces) or not self._inputs.allow_partial:
            return kept
        piece = self._pieces[count]
        tokens = int(self._tokens[piece // len(CLASSES) % len(self._tokens), 0])

        def partly(cuts: int) -> Counts:
            rows = kept.copy()
            rows.ravel()[piece] = max(0, tokens - (most - cuts) * ROW_ALIGNMENT)
            return rows

        most = -(-tokens // ROW_ALIGNMENT)
        return partly(_last_true(0, most - 1, lambda cuts: self._fits(partly(cuts))))

    def _with_free_copies(self, count: int) -> ActivationPlacement | None:
        """Return the placement that also keeps less valuable pieces which are copied for free.

        Args:
            count: Number of pieces that fit if they alone are copied.

        Returns:
            None if the tier is full.
        """

        def sent(pieces: int) -> Counts:
            kept = self._kept(pieces)
            return self._rows(self._most_wanted(kept), kept)

        def fits_tier(pieces: int) -> bool:
            saved = self._saved(sent(pieces), self._tokens - self._kept(pieces))
            return self._in_tier(saved) <= self._tier_room

        if not self._inputs.allow_partial or not fits_tier(count):
            return None
        copied = sent(_last_true(count, len(self._pieces), fits_tier))

        def beside(pieces: int) -> ActivationPlacement:
            return self._placed(np.maximum(self._kept(pieces), copied), copied)

        def fits(pieces: int) -> bool:
            return self._fits_device(beside(pieces))

        return beside(_last_true(self._always, count, fits)) if fits(self._always) else None

    def _placed(self, kept: Counts, offloaded: Counts) -> ActivationPlacement:
        """Return the placement with given rows retained or offloaded, and the rest recomputed."""
        return ActivationPlacement(kept - offloaded, offloaded, self._tokens - kept)

    def _fits(self, kept: Counts) -> bool:
        return self._fitting(kept) is not None

    def _fitting(self, kept: Counts) -> ActivationPlacement | None:
        """Return given rows, with as much offloaded as possible if they do not fit otherwise."""
        retained = self._placed(kept, np.zeros_like(kept))
        if self._fits_device(retained):
            return retained
        wanted = self._most_wanted(kept)
        copied = self._at_rate(kept, wanted, self._most_rate(wanted))
        return copied if self._fits_device(copied) else None

    def _with_least_copies(self, placement: ActivationPlacement) -> ActivationPlacement:
        """Return a placement that fits with as little of it offloaded as necessary."""
        if not placement.offloads_anything:
            return placement
        kept = placement.retained + placement.offloaded
        wanted = self._most_wanted(kept)

        def is_too_little(rate: float) -> bool:
            return not self._fits_device(self._at_rate(kept, wanted, rate))

        _, least = _bisected(self._most_rate(wanted), is_too_little)
        return self._at_rate(kept, wanted, least)

    def _most_wanted(self, kept: Counts) -> Table:
        """Return the most bytes of each subsequence to offload of given rows, [kinds, N]."""
        saved = self._saved(kept, self._tokens - kept)
        wanted: Table = np.minimum(saved, self._most_offloaded)
        return wanted

    def _at_rate(self, kept: Counts, wanted: Table, rate: float) -> ActivationPlacement:
        """Return given rows with up to `rate` bytes offloaded for each second of overlap."""
        offloaded = self._rows(np.minimum(wanted, rate * self._inputs.next_forward_s), kept)
        return self._placed(kept, offloaded)

    def _most_rate(self, wanted: Table) -> float:
        """Return the highest rate at which the tier has room for the wanted bytes."""
        next_forward_s = self._inputs.next_forward_s
        # Slightly above the largest rate, so that every subsequence offloads all that is wanted.
        most = float((wanted / next_forward_s).max()) * (1 + 1e-9)
        if self._in_tier(wanted) <= self._tier_room:
            return most

        def fits(rate: float) -> bool:
            return self._in_tier(np.minimum(wanted, rate * next_forward_s)) <= self._tier_room

        return _bisected(most, fits)[0]

    def _in_tier(self, offloaded: Table) -> float:
        """Return the bytes that given bytes of each subsequence, [kinds, N], take in the tier."""
        return float(offloaded.sum(axis=1) @ (self._stages * self._inputs.sequences))

    def _rows(self, wanted: Table, kept: Counts) -> Counts:
        """Return the kept rows that make up at most the wanted bytes, [kinds, N, 3].

        At most one class of a subsequence is cut: a class that is kept in part stays on the device,
        and then no other is cut.
        """
        inputs = self._inputs
        row_bytes = np.repeat(inputs.row_bytes[:, None], len(self._tokens), axis=1)
        # Only layers without attention output save inputs that layers share.
        recomputes_attention = kept[:, :, ATTENTION] < inputs.tokens
        row_bytes[:, :, X_IN] += inputs.shared_input_bytes[:, None] * recomputes_attention
        in_part = (kept > 0) & (kept < self._tokens)
        return prefix_rows(
            wanted,
            rows=np.where(in_part, 0, kept),
            row_bytes=row_bytes,
            allow_partial=inputs.allow_partial & ~in_part.any(axis=2),
        )

    def _saved(self, rows: Counts, recomputed: Counts) -> Table:
        """Return the bytes of some saved rows of each subsequence, [kinds, N]."""
        return saved_bytes(
            rows,
            recomputed=recomputed,
            row_bytes=self._inputs.row_bytes,
            shared_input_bytes=self._inputs.shared_input_bytes,
        )

    def _fits_device(self, placement: ActivationPlacement) -> bool:
        room = float(self._inputs.device_bytes[0]) - _ROUNDING_BYTES
        return self._needed(placement) <= room

    def _needed(self, placement: ActivationPlacement) -> float:
        """Return the device bytes at the worst moment: retained rows, and memory for copies."""
        retained = self._saved(placement.retained, placement.recomputed)
        held = (retained * self._inputs.in_flight).sum(axis=1) @ self._stages
        return float(held) + self._inputs.slots[0].reserved(placement)

    def _seconds(self, placement: ActivationPlacement) -> float:
        """Return the seconds of recomputation."""
        shares = placement.recomputed / self._tokens
        return float((self._recompute_s * shares).sum(axis=(1, 2)) @ self._stages)
