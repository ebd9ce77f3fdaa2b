"""Tables that activation policies decide from: bytes, seconds, memory for tensors and copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import ActivationPlacement, Counts, kinds_of_rows, saved_bytes
from sppo.schedule.costs import Table


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInputs:
    """Bytes, seconds and available memory that a policy decides from.

    Tables are [stages, subsequences] unless noted. Stage s is on rank s mod the number of ranks.

    Attributes:
        tokens: Tokens of every subsequence, [subsequences].
        row_bytes: Bytes of one row of each class on one device, all layers, [stages, 3].
        shared_input_bytes: Bytes of one row's layer inputs that are not saved because layers share
            a saved input, [stages]; see :func:`saved_bytes`.
        in_flight: Number of times a subsequence is held at once in the worst case; more than once
            if several sequences overlap.
        sequences: Number of sequences that are in the next tier at once, [stages].
        next_forward_s: Seconds of compute of the next subsequence's forward, which copies of this
            subsequence overlap; without the group's collectives, which use the same links.
        hidden_bytes: Bytes that are copied out during the next subsequence's forward and back
            during its backward, which precedes the backward of this subsequence.
        linear_recompute_s: Seconds to recompute the linear class of a whole subsequence.
        attention_recompute_s: Seconds to recompute the attention class of a whole subsequence.
        copy_bytes_per_s: Rate of the slower copy direction; 0 without another tier.
        may_offload: Whether the hybrid policy may offload tensors of a stage, [stages].
        device_bytes: Available bytes for saved activations and their copies on each rank's device,
            [ranks].
        tier_bytes: Available bytes in the next tier for each rank, [ranks].
        slots: Function that returns the device bytes for the copies of a placement of the stages of
            a rank, [ranks]; the same one for ranks that need the same.
        allow_partial: Whether a class may be cut; if not, all rows of a class are placed alike.
        lasts: Index of the last subsequence of each sequence, whose backward starts at once.
    """

    tokens: Counts
    row_bytes: Table
    shared_input_bytes: Table
    in_flight: Counts
    sequences: Counts
    next_forward_s: Table
    hidden_bytes: Table
    linear_recompute_s: Table
    attention_recompute_s: Table
    copy_bytes_per_s: float
    may_offload: npt.NDArray[np.bool_]
    device_bytes: Table
    tier_bytes: Table
    slots: tuple[Callable[[ActivationPlacement], float], ...]
    allow_partial: bool = True
    lasts: tuple[int, ...] = (-1,)

    @property
    def kinds(self) -> tuple[list[int], list[int]]:
        """First stage of each kind, and kind of each stage, of stages with equal tables."""
        return kinds_of_rows(*(getattr(self, name) for name in _OF_STAGES))

    def of_kinds(self, rank: int) -> tuple[PolicyInputs, list[int]]:
        """Return the inputs of one rank with one stage of each kind, and the kinds of its stages.

        Counts and seconds are those of all stages of a kind together.
        """
        own = {name: getattr(self, name)[rank :: len(self.slots)] for name in _OF_STAGES}
        firsts, kinds = kinds_of_rows(*own.values())
        of_kinds = {name: table[firsts] for name, table in own.items()}
        for name in _SUMS:
            alike = np.bincount(kinds).reshape(-1, *[1] * (of_kinds[name].ndim - 1))
            of_kinds[name] = of_kinds[name] * alike
        limits = {
            name: getattr(self, name)[rank : rank + 1]
            for name in ("device_bytes", "tier_bytes", "slots")
        }
        return replace(self, **of_kinds, **limits), kinds

    @property
    def class_bytes(self) -> Table:
        """Bytes of a whole class, [stages, subsequences, 3]."""
        result: Table = self.tokens[None, :, None] * self.row_bytes[:, None, :]
        return result

    def copied_bytes(self, waits: float) -> Table:
        """Return the most bytes of each subsequence to offload; 0 for last subsequences.

        Args:
            waits: Share of the overlapped forward for which a copy may be waited for as well.
        """
        copied = self.hidden_bytes.copy()
        if waits > 0:
            copied += waits * self.copy_bytes_per_s * self.next_forward_s
        copied[~self.may_offload] = 0.0
        copied[:, list(self.lasts)] = 0.0
        return copied

    @property
    def recompute_s(self) -> Table:
        """Seconds to recompute each class of a whole subsequence, [stages, subsequences, 3]."""
        linear_s, attention_s = self.linear_recompute_s, self.attention_recompute_s
        recompute_s: Table = np.stack([np.zeros_like(linear_s), attention_s, linear_s], axis=-1)
        return recompute_s

    def saved_bytes(self, rows: Counts, *, recomputed: Counts) -> Table:
        """Return the bytes of given saved rows, [stages, subsequences]; see :func:`saved_bytes`."""
        return saved_bytes(
            rows,
            recomputed=recomputed,
            row_bytes=self.row_bytes,
            shared_input_bytes=self.shared_input_bytes,
        )

    def needed(self, placement: ActivationPlacement) -> Table:
        """Return the device bytes that a placement takes at the worst moment, [ranks]."""
        ranks = len(self.slots)
        retained = self.saved_bytes(placement.retained, recomputed=placement.recomputed)
        held: Table = (retained * self.in_flight).sum(axis=1).reshape(-1, ranks).sum(axis=0)
        of_ranks = (placement.of_stages(slice(rank, None, ranks)) for rank in range(ranks))
        copies = [bytes_of(own) for bytes_of, own in zip(self.slots, of_ranks, strict=True)]
        needed: Table = held + copies
        return needed

    def needed_in_tier(self, placement: ActivationPlacement) -> Table:
        """Return the bytes that a placement takes of the tier, [ranks]."""
        offloaded = self.saved_bytes(placement.offloaded, recomputed=placement.recomputed)
        of_stages = offloaded.sum(axis=1) * self.sequences
        taken: Table = of_stages.reshape(-1, len(self.slots)).sum(axis=0)
        return taken


_SUMS = ("in_flight", "sequences", "linear_recompute_s", "attention_recompute_s")
_OF_STAGES = (
    *("row_bytes", "shared_input_bytes", "next_forward_s", "hidden_bytes", "may_offload"),
    *_SUMS,
)
"""Tables of :class:`PolicyInputs` with a row for each stage; those that add up over stages."""
