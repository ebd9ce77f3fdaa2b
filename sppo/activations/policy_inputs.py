"""Tables that activation policies decide from: bytes, seconds, memory for tensors and copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sppo.activations.placement import ActivationPlacement, Counts
from sppo.activations.tensor_classes import ATTENTION, LINEAR, X_IN
from sppo.schedule.costs import Table


@dataclass(frozen=True, slots=True, eq=False)
class CopySlots:
    """Device memory for copies: a fixed number of block slots, whatever is copied when.

    Attributes:
        row_bytes: Bytes of the slots per row of the subsequence that offloads most, [stages, 3].
        padding_bytes: Upper bound of the bytes that alignment adds to the slots, [stages].
        joined_bytes: Upper bound of the bytes for joining the parts of a cut class of one layer,
            [stages].
        queries_bytes: Bytes for joining a class whose last part is recomputed, which the working
            set does not count already: queries and keys of one layer, [stages].
        taken_at_once: Number of layers whose tensors backward holds at once, unless it recomputes
            attention, [stages].
    """

    row_bytes: Table
    padding_bytes: Table
    joined_bytes: Table
    queries_bytes: Table
    taken_at_once: Table

    def of_stage(self, stage: int) -> CopySlots:
        """Return the slots of one stage."""
        only = slice(stage, stage + 1)
        return CopySlots(
            self.row_bytes[only],
            self.padding_bytes[only],
            self.joined_bytes[only],
            self.queries_bytes[only],
            self.taken_at_once[only],
        )

    def reserved(self, placement: ActivationPlacement) -> Table:
        """Return the most bytes that a placement needs, [stages]; for one stage, per row."""
        needed: Table = self.of_blocks(placement.offloaded) + self.joined(placement).max(axis=1)
        return needed

    def of_blocks(self, offloaded: Counts) -> Table:
        """Return the bytes of slots for offloaded rows, [stages, subsequences, 3] to [stages]."""
        slots = (offloaded @ self.row_bytes[:, :, None])[:, :, 0].max(axis=1)
        taken: Table = slots + self.padding_bytes * (slots > 0)
        return taken

    def joined(self, placement: ActivationPlacement) -> Table:
        """Return the bytes for joining the cut classes of each subsequence, [stages, N]."""
        retains, offloads = placement.retained > 0, placement.offloaded > 0
        recomputes = placement.recomputed > 0
        cut_with_rest = (retains | offloads) & recomputes
        joined: Table = self.joined_bytes[:, None] * _any_class(retains & offloads & ~recomputes)
        joined += self.queries_bytes[:, None] * _any_class(cut_with_rest)
        joined *= np.where(recomputes[:, :, ATTENTION], 1.0, self.taken_at_once[:, None])
        return joined


def _any_class(holds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return whether any class is True, [stages, subsequences]; many times faster than np.any."""
    return holds[:, :, X_IN] | holds[:, :, ATTENTION] | holds[:, :, LINEAR]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyInputs:
    """Bytes, seconds and available memory that a policy decides from.

    Tables are [stages, subsequences] unless noted.

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
        device_bytes: Available bytes for saved activations on each stage's device, [stages].
        tier_bytes: Available bytes in the next tier for each stage, [stages].
        slots: Device memory for copies.
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
    device_bytes: Table
    tier_bytes: Table
    slots: CopySlots
    allow_partial: bool = True
    lasts: tuple[int, ...] = (-1,)

    @property
    def class_bytes(self) -> Table:
        """Bytes of a whole class, [stages, subsequences, 3]."""
        result: Table = self.tokens[None, :, None] * self.row_bytes[:, None, :]
        return result
