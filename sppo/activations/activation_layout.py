"""What one rank saves of the units of a step on one stage: rows by tensor, bytes, places.

The offloaded rows of a layer's tensors travel together, packed one behind the other as one block.
Blocks have their places in the next tier here, before the step, so that nothing is allocated while
it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from sppo.activations.placement import Rows, SubsequencePlacement
from sppo.activations.tensor_classes import (
    ATTENTION,
    CLASSES,
    RESIDUAL,
    tensor_bytes_per_token,
    tensors_of,
)
from sppo.config.model import ModelConfig
from sppo.schedule.orders import UnitKey

TENSOR_ALIGNMENT_BYTES = 64
"""Tensors begin at multiples of it, as the kernels like them."""
BLOCK_ALIGNMENT_BYTES = 4096
"""Blocks begin at and fill multiples of it: what a disk reads and writes past the page cache."""
PREFETCH_LAYERS = 2
"""Layers whose blocks may be under way back ahead of the one in use. 1 + ceil(t_H2D / t_backward)
is 2 wherever a block comes back within a layer's backward; where copies are slower, the layers in
between are what the whole step waits for, and more room would only move the wait."""


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
class BlockLayout:
    """The blocks of one stage's layers, as functions of the rows that are offloaded.

    Attributes:
        model: Whose tensors they carry.
        element_bytes: Of the compute dtype.
        layers: Of the stage.
        input_every: Layers that share one saved input.
        shared_by: Devices that share the rows of a subsequence.
    """

    model: ModelConfig
    element_bytes: int
    layers: range
    input_every: int = 1
    shared_by: int = 1

    def has_own_input(self, layer: int, *, attention_saved: bool) -> bool:
        """Whether a layer saves its input.

        Without its attention output no layer can recompute the input of the one above.
        """
        return (layer - self.layers.start) % self.input_every == 0 or not attention_saved

    def tensor_rows(
        self, rows: Rows, *, own_input: bool, residual: Rows | None = None
    ) -> dict[str, int]:
        """Rows of each tensor, by name, without the tensors that have none.

        Args:
            rows: of each class.
            own_input: whether x_in is among them.
            residual: of those of the residual stream, where they have others.
        """
        found = {}
        for index in range(len(CLASSES)):
            for name in sorted(tensors_of((index,), self.model)):
                of_tensor = rows if residual is None or name not in RESIDUAL else residual
                if of_tensor[index] and (own_input or name != "x_in"):
                    found[name] = of_tensor[index]
        return found

    def tensor_bytes(
        self, rows: Rows, *, own_input: bool, residual: Rows | None = None
    ) -> dict[str, int]:
        """Bytes of the same tensors on one device."""
        sizes = tensor_bytes_per_token(self.model, element_bytes=self.element_bytes)
        found = self.tensor_rows(rows, own_input=own_input, residual=residual)
        return {name: -(-count * sizes[name] // self.shared_by) for name, count in found.items()}

    def blocks(
        self, rows: Rows, *, attention_saved: bool, residual: Rows | None = None
    ) -> tuple[int, ...]:
        """Bytes of each layer's block; see :meth:`tensor_rows`."""
        sizes = {
            own: packed_bytes(self.tensor_bytes(rows, own_input=own, residual=residual).values())
            for own in (False, True)
        }
        return tuple(
            sizes[self.has_own_input(layer, attention_saved=attention_saved)]
            for layer in self.layers
        )

    @property
    def most_padding_bytes(self) -> int:
        """What alignment adds to a block at most."""
        tensors = len(tensor_bytes_per_token(self.model, element_bytes=1))
        return tensors * (TENSOR_ALIGNMENT_BYTES - 1) + BLOCK_ALIGNMENT_BYTES - 1

    def taken_at_once(self, *, attention_saved: bool) -> int:
        """Layers that backward takes together at most: those that share a saved input."""
        return min(self.input_every, len(self.layers)) if attention_saved else 1

    @property
    def ring_slots(self) -> int:
        """Blocks on their way back, or in use."""
        return PREFETCH_LAYERS + self.taken_at_once(attention_saved=True)

    @property
    def staging_slots(self) -> int:
        """Blocks on their way to a disk: a subsequence's, which drain while the next computes."""
        return max(2, len(self.layers))


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


def packed_offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each tensor begins in a block, in the order given, and the size of the block."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += aligned_bytes(size)
    return offsets, aligned_bytes(end, BLOCK_ALIGNMENT_BYTES)


def packed_bytes(sizes: Iterable[int]) -> int:
    """Size of a block of tensors of these sizes."""
    return aligned_bytes(sum(map(aligned_bytes, sizes)), BLOCK_ALIGNMENT_BYTES)


def aligned_bytes(size: int, alignment: int = TENSOR_ALIGNMENT_BYTES) -> int:
    """``size`` up to the next aligned offset."""
    return -(-size // alignment) * alignment
