"""Tables that activation policies decide from: bytes, seconds, memory for tensors and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import ActivationPlacement, Counts, kinds_of_rows, saved_bytes
from sppo.activations.tensor_classes import ATTENTION, LINEAR, X_IN
from sppo.schedule.costs import Table


@dataclass(frozen=True, slots=True)
class CopySlots:
    """Device memory for copies of one rank: a fixed number of block slots, whatever is copied when.

    Attributes:
        row_bytes: Bytes of the slots per row of the subsequence that offloads most, by class.
        padding_bytes: Upper bound of the bytes that alignment adds to the slots.
        least_bytes: Bytes of the slots if only blocks of K and V are copied.
        joined_bytes: Upper bound of the bytes for joining the parts of a cut class of one layer.
        queries_bytes: Bytes for joining a class whose last part is recomputed, which the working
            set does not count already: queries and keys of one layer.
        taken_at_once: Number of layers whose tensors backward holds at once, unless it recomputes
            attention.
    """

    row_bytes: tuple[float, float, float]
    padding_bytes: float
    least_bytes: float
    joined_bytes: float
    queries_bytes: float
    taken_at_once: int

    def reserved(self, placement: ActivationPlacement) -> float:
        """Return the most bytes that a placement of the rank's stages needs."""
        blocks = float((placement.offloaded @ np.array(self.row_bytes)).max())
        slots = blocks + self.padding_bytes * (blocks > 0)
        return max(slots, self.least_bytes) + float(self.joined(placement).max())

    def joined(self, placement: ActivationPlacement) -> Table:
        """Return the bytes for joining the cut classes of each subsequence, [stages, N]."""
        retains, offloads = placement.retained > 0, placement.offloaded > 0
        recomputes = placement.recomputed > 0
        cut_with_rest = (retains | offloads) & recomputes
        joined = self.joined_bytes * _any_class(retains & offloads & ~recomputes).astype(float)
        joined += self.queries_bytes * _any_class(cut_with_rest)
        found: Table = joined * np.where(recomputes[:, :, ATTENTION], 1, self.taken_at_once)
        return found


def _any_class(holds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return whether any class is True, [stages, subsequences]; many times faster than np.any."""
    return holds[:, :, X_IN] | holds[:, :, ATTENTION] | holds[:, :, LINEAR]


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
        slots: Device memory for copies on each rank, [ranks].
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
    slots: tuple[CopySlots, ...]
    allow_partial: bool = True
    lasts: tuple[int, ...] = (-1,)

    @property
    def kinds(self) -> tuple[list[int], list[int]]:
        """First stage of each kind, and kind of each stage, of stages with equal tables."""
        return kinds_of_rows(*(getattr(self, name) for name in _OF_STAGES))

    def of_rank(self, rank: int) -> PolicyInputs:
        """Return the inputs of the stages of one rank."""
        ranks = len(self.slots)
        own = self.of_stages(range(rank, len(self.row_bytes), ranks))
        return replace(
            own,
            device_bytes=self.device_bytes[rank : rank + 1],
            tier_bytes=self.tier_bytes[rank : rank + 1],
            slots=self.slots[rank : rank + 1],
        )

    def of_stages(self, stages: Sequence[int]) -> PolicyInputs:
        """Return the inputs of some stages."""
        own = [*stages]
        return replace(self, **{name: getattr(self, name)[own] for name in _OF_STAGES})

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

    def needed(self, placement: ActivationPlacement) -> tuple[Table, Table]:
        """Return the bytes that a placement takes of the devices and of the tier, [ranks] each."""
        retained, offloaded = (
            saved_bytes(
                rows,
                recomputed=placement.recomputed,
                row_bytes=self.row_bytes,
                shared_input_bytes=self.shared_input_bytes,
            )
            for rows in (placement.retained, placement.offloaded)
        )
        ranks = len(self.slots)
        held = (retained * self.in_flight).sum(axis=1).reshape(-1, ranks).sum(axis=0)
        sent = (offloaded.sum(axis=1) * self.sequences).reshape(-1, ranks).sum(axis=0)
        slots = [
            own.reserved(placement.of_stages(slice(rank, None, ranks)))
            for rank, own in enumerate(self.slots)
        ]
        return held + np.array(slots), sent


_OF_STAGES = (
    *("row_bytes", "shared_input_bytes", "in_flight", "sequences", "next_forward_s"),
    *("hidden_bytes", "linear_recompute_s", "attention_recompute_s", "may_offload"),
)
"""Tables of :class:`PolicyInputs` with a row for each stage."""
