"""Layout of the activations that one rank saves: rows, bytes, extents of blocks, order of use.

The offloaded rows of the tensors of one layer of one unit are packed into one block, which is
copied at once. Extents in the next tier are assigned to all blocks before the step, so that nothing
is allocated while the step runs. The order in which backward uses the blocks is known before the
step as well, so that blocks return in this order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from sppo.activations.block_layout import (
    TENSOR_ALIGNMENT_BYTES,
    BlockLayout,
    aligned_bytes,
    packed_bytes,
)
from sppo.activations.subsequence_placement import SubsequencePlacement
from sppo.activations.tensor_classes import (
    ATTENTION,
    CHOSEN,
)
from sppo.schedule.actions import Action, ActionKind, UnitKey

MAX_BLOCKS_IN_FLIGHT_OUT = 2
"""Number of blocks that may be in flight directly from where an accelerator computed them before
compute waits: the block just saved and the one before."""


class ActivationKey(NamedTuple):
    """Key of the saved tensors of one layer of one unit; the head is the layer after the last."""

    sequence: int
    subsequence: int
    layer: int
    is_kv: bool = False
    """True if the key is of K and V, if they are offloaded between forward and backward."""


class Extent(NamedTuple):
    """Range of bytes of a block in the next tier."""

    offset_bytes: int
    size_bytes: int
    """Size of the block; 0 for a key that offloads nothing."""


@dataclass(frozen=True, slots=True)
class OffloadSchedule:
    """Blocks of one step: their extents, the order of their use, and the number of slots."""

    extents: Mapping[ActivationKey, Extent]
    """Extents of all keys of the step; keys that offload nothing have size 0."""
    order: Sequence[ActivationKey]
    """Keys in the order in which backward uses their blocks."""
    staging_slots: int
    """Host slots for blocks on their way to or from a disk."""
    ring_slots: int
    """Device slots for blocks that come back or are in use."""

    @property
    def largest_bytes(self) -> int:
        """Size of the largest block."""
        return max((extent.size_bytes for extent in self.extents.values()), default=0)

    @property
    def tier_bytes(self) -> int:
        """Bytes of the tier that hold all blocks."""
        return max((sum(extent) for extent in self.extents.values()), default=0)


@dataclass(frozen=True, slots=True)
class ActivationLayout:
    """Rows and bytes of every unit's saved tensors that one rank retains and offloads.

    Attributes:
        blocks: Layout of the blocks of the stage.
        shards: Placements of each unit's shards, one per rank over which the unit is sharded.
        rank: Position of this rank among these ranks.
        unsharded_token_placements: Placements of the tensors that have all of a unit's tokens and a
            shard of the heads or of the MLP width (Megatron); None if every tensor has only the
            rank's own tokens.
        sequences_in_flight: Number of sequences that have saved tensors at once; these are always
            consecutive sequences.
        kv_row_bytes: Bytes of K, and of V, of one token and layer, if K and V are offloaded too; 0
            if they stay on the device.
    """

    blocks: BlockLayout
    shards: Mapping[UnitKey, tuple[SubsequencePlacement, ...]]
    rank: int = 0
    unsharded_token_placements: Mapping[UnitKey, SubsequencePlacement] | None = None
    sequences_in_flight: int = 1
    kv_row_bytes: int = 0

    def saved_keys(self, unit: UnitKey) -> list[ActivationKey]:
        """Return the keys of a unit's saved tensors, one per layer, in the order of backward."""
        return [ActivationKey(*unit, layer) for layer in reversed(self.blocks.layers)]

    def kv_keys(self, unit: UnitKey) -> list[ActivationKey]:
        """Return the keys of a unit's offloaded K and V, one per layer that has them.

        They are in the order of return.
        """
        return [ActivationKey(*unit, layer, is_kv=True) for layer in self.blocks.kv_layers]

    def saves_input(self, unit: UnitKey, layer: int) -> bool:
        """Return whether a layer saves its input."""
        return self.blocks.has_own_input(
            layer, attention_saved=self._placement(unit).attention_saved
        )

    def tensor_rows(self, unit: UnitKey, layer: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return (offloaded, retained) rows of each tensor of a layer.

        The offloaded rows are the first rows of a tensor; the retained rows follow. The chosen
        experts are always retained.
        """
        placement, residual = self._placement(unit), self.shards[unit][self.rank]
        own, rows = self.saves_input(unit, layer), self.blocks.tensor_rows
        retained = rows(layer, placement.retained, own_input=own, residual=residual.retained)
        if self.blocks.model.layer_type(layer).routed:
            retained[CHOSEN] = placement.tokens
        return (
            rows(layer, placement.offloaded, own_input=own, residual=residual.offloaded),
            retained,
        )

    def unsaved_attention_tokens(self, unit: UnitKey) -> tuple[int, ...]:
        """Return the number of last tokens, per rank, whose attention output is recomputed."""
        return tuple(shard.recomputed[ATTENTION] for shard in self.shards[unit])

    def retained_bytes(self, unit: UnitKey) -> int:
        """Return the bytes of the unit that stay on the device, with every tensor aligned."""
        placement, residual = self._placement(unit), self.shards[unit][self.rank]
        saves = Counter(
            (self.blocks.model.layer_type(layer), self.saves_input(unit, layer))
            for layer in self.blocks.layers
        )
        found = 0
        for (layer_type, own_input), layers in saves.items():
            sizes = self.blocks.layer_bytes(
                layer_type,
                np.array([placement.retained]),
                residual=np.array([residual.retained]),
                alignment=TENSOR_ALIGNMENT_BYTES,
            )
            chosen_bytes = self.blocks.row_bytes[layer_type].get(CHOSEN, 0) * placement.tokens
            found += layers * (int(sizes[int(own_input), 0]) + aligned_bytes(chosen_bytes))
        return found

    def extents(self) -> dict[ActivationKey, Extent]:
        """Return the extents of all blocks of the stage; those of a sequence are contiguous.

        A sequence takes the region of the sequence that is :attr:`sequences_in_flight` before it.
        """
        layers, ends = self.blocks.layers, {sequence: 0 for sequence, _ in self.shards}
        starts: dict[ActivationKey, Extent] = {}
        units = sorted(self.shards)
        placements = [self._placement(unit) for unit in units]
        offloaded, residual = (
            np.array([one.offloaded for one in own], dtype=np.int64).reshape(-1, 3)
            for own in (placements, [self.shards[unit][self.rank] for unit in units])
        )
        saved = np.array([placement.attention_saved for placement in placements])
        blocks = self.blocks.blocks(offloaded, attention_saved=saved, residual=residual)
        for unit, sizes in zip(units, blocks.tolist(), strict=True):
            *offsets, ends[unit[0]] = accumulate(sizes, initial=ends[unit[0]])
            for layer, offset, size in zip(layers, offsets, sizes, strict=True):
                starts[ActivationKey(*unit, layer)] = Extent(offset, size)
            if not self.kv_row_bytes:
                continue
            part_bytes = sum(shard.tokens for shard in self.shards[unit]) * self.kv_row_bytes
            size = packed_bytes([part_bytes, part_bytes])
            for key in self.kv_keys(unit):
                starts[key] = Extent(ends[unit[0]], size)
                ends[unit[0]] += size
        stride = max(ends.values(), default=0)
        return {
            key: Extent(offset + key.sequence % self.sequences_in_flight * stride, size)
            for key, (offset, size) in starts.items()
        }

    def _placement(self, unit: UnitKey) -> SubsequencePlacement:
        """Return the placement of the tensors outside the residual stream."""
        if self.unsharded_token_placements is None:
            return self.shards[unit][self.rank]
        return self.unsharded_token_placements[unit]


def offload_schedule(
    stages: Collection[ActivationLayout], *, order: Sequence[ActivationKey]
) -> OffloadSchedule:
    """Return the offload schedule of a rank, with the extents of its stages concatenated.

    Args:
        stages: Layout of each stage.
        order: All keys in the order in which backward uses their blocks.
    """
    extents: dict[ActivationKey, Extent] = {}
    begin = 0
    for stage in stages:
        own = {key: Extent(begin + at, size) for key, (at, size) in stage.extents().items()}
        begin = max(map(sum, own.values()), default=begin)
        extents |= own
    return OffloadSchedule(
        extents,
        order,
        staging_slots=max(stage.blocks.staging_slots for stage in stages),
        ring_slots=max(stage.blocks.ring_slots for stage in stages),
    )


def order_of_use(
    program: Iterable[Action],
    stages: Mapping[int, ActivationLayout],
    *,
    shards: Mapping[int, ActivationLayout] | None = None,
) -> list[ActivationKey]:
    """Return the keys of all blocks of a rank, in the order in which backward uses them.

    A backward uses one block per layer. The blocks of a unit's K and V may return from their H2D
    on, and are used during the next backward: one before the block of each layer except the first,
    the rest after the backward. A backward that itself reads the K and V of waiting blocks uses
    all of them first.

    Args:
        program: Program of the rank.
        stages: Layout of the whole units of each stage of the rank, by stage index.
        shards: Layout of the MSP shards that the rank runs of each stage, by stage index; None if
            no unit is cut.
    """
    order: list[ActivationKey] = []
    waiting: deque[ActivationKey] = deque()
    for action in program:
        stage = (stages if action.num_shards == 1 else shards or {}).get(action.stage)
        if stage is None:
            continue
        if action.kind is ActionKind.H2D and action.wire == "kv":
            waiting.extend(stage.kv_keys(action.unit))
        elif action.kind is ActionKind.B:
            layers = stage.blocks.layers
            if any(key.sequence == action.sequence and key.layer in layers for key in waiting):
                order += waiting
                waiting.clear()
            for number, key in enumerate(stage.saved_keys(action.unit)):
                if number and waiting:
                    order.append(waiting.popleft())
                order.append(key)
            order += waiting
            waiting.clear()
    return order
