"""What one rank saves of the units of one step on one stage: rows by tensor, bytes, places.

Blocks (:mod:`sppo.activations.block_layout`) have their places in the next tier here, before the
step, so that nothing is allocated while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from sppo.activations.block_layout import BlockLayout, aligned_bytes
from sppo.activations.placement import ATTENTION
from sppo.activations.subsequence_placement import SubsequencePlacement

UnitKey = tuple[int, int]
"""(sequence, subsequence)."""


class ActivationKey(NamedTuple):
    """One layer of one unit; the head counts as the layer after the last."""

    sequence: int
    subsequence: int
    layer: int


class Extent(NamedTuple):
    """Where a block lies in the tier."""

    offset_bytes: int
    size_bytes: int
    """0 for a key that offloads nothing."""


@dataclass(frozen=True, slots=True)
class OffloadSchedule:
    """What is offloaded in one step."""

    extents: Mapping[ActivationKey, Extent]
    """Of every key of the step, also of those that offload nothing."""
    order: Sequence[ActivationKey]
    """In which backward takes the keys."""
    staging_slots: int
    """Blocks that may be on their way to a disk, or from it, at once."""
    ring_slots: int
    """Blocks that may be on the device, on their way back or in use."""

    @property
    def largest_bytes(self) -> int:
        """The largest block."""
        return max((extent.size_bytes for extent in self.extents.values()), default=0)

    @property
    def tier_bytes(self) -> int:
        """Room that the blocks take."""
        return max((sum(extent) for extent in self.extents.values()), default=0)


@dataclass(frozen=True, slots=True)
class ActivationLayout:
    """What one rank does with every unit's saved tensors.

    Attributes:
        blocks: Of its stage.
        shards: Of each unit, what every rank that shares its tokens does with its own.
        rank: Its position among those.
        whole: What all do with tensors that have all of a unit's tokens and a shard of the heads or
            of the MLP width (Megatron); None where every tensor has a rank's own tokens.
    """

    blocks: BlockLayout
    shards: Mapping[UnitKey, tuple[SubsequencePlacement, ...]]
    rank: int = 0
    whole: Mapping[UnitKey, SubsequencePlacement] | None = None

    def saves_input(self, unit: UnitKey, layer: int) -> bool:
        """Whether a layer saves its input."""
        return self.blocks.has_own_input(
            layer, attention_saved=self._placement(unit).attention_saved
        )

    def tensor_rows(self, unit: UnitKey, layer: int) -> tuple[dict[str, int], dict[str, int]]:
        """(offloaded, retained): first rows of each tensor that a layer saves, and those behind."""
        placement, residual = self._placement(unit), self.shards[unit][self.rank]
        own, rows = self.saves_input(unit, layer), self.blocks.tensor_rows
        return (
            rows(placement.offloaded, own_input=own, residual=residual.offloaded),
            rows(placement.retained, own_input=own, residual=residual.retained),
        )

    def without_attention(self, unit: UnitKey) -> tuple[int, ...]:
        """Last tokens of each rank's whose attention output is recomputed."""
        return tuple(shard.recomputed[ATTENTION] for shard in self.shards[unit])

    def retained_bytes(self, unit: UnitKey) -> int:
        """Bytes of the unit that stay on the device, every tensor up to the next aligned offset."""
        placement, residual = self._placement(unit), self.shards[unit][self.rank]
        return sum(
            aligned_bytes(size)
            for layer in self.blocks.layers
            for size in self.blocks.tensor_bytes(
                placement.retained,
                own_input=self.saves_input(unit, layer),
                residual=residual.retained,
            ).values()
        )

    def offload_schedule(
        self, backward_order: Sequence[UnitKey], *, sequences_in_flight: int
    ) -> OffloadSchedule:
        """Where offloaded blocks lie: those of a sequence one behind the other.

        Args:
            backward_order: the units in the order of their backwards.
            sequences_in_flight: sequences that have blocks in the tier at once, always those that
                began one after another.
        """
        layers, ends = self.blocks.layers, {sequence: 0 for sequence, _ in self.shards}
        starts: dict[ActivationKey, Extent] = {}
        for unit in sorted(self.shards):
            sizes = self._block_bytes(unit)
            *offsets, ends[unit[0]] = accumulate(sizes, initial=ends[unit[0]])
            for layer, offset, size in zip(layers, offsets, sizes, strict=True):
                starts[ActivationKey(*unit, layer)] = Extent(offset, size)
        stride = max(ends.values(), default=0)
        return OffloadSchedule(
            {
                key: Extent(offset + key.sequence % sequences_in_flight * stride, size)
                for key, (offset, size) in starts.items()
            },
            [ActivationKey(*unit, layer) for unit in backward_order for layer in reversed(layers)],
            staging_slots=self.blocks.staging_slots,
            ring_slots=self.blocks.ring_slots,
        )

    def _placement(self, unit: UnitKey) -> SubsequencePlacement:
        """Of the tensors that are not of the residual stream."""
        return self.shards[unit][self.rank] if self.whole is None else self.whole[unit]

    def _block_bytes(self, unit: UnitKey) -> tuple[int, ...]:
        """Of each layer's block."""
        placement = self._placement(unit)
        return self.blocks.blocks(
            placement.offloaded,
            attention_saved=placement.attention_saved,
            residual=self.shards[unit][self.rank].offloaded,
        )
