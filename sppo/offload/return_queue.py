"""Queue of the blocks that are away, which return ahead of their use."""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence

from sppo.activations.activation_layout import PREFETCH_LAYERS, ActivationKey
from sppo.offload.tiers import Block, HostTier, Slots


class ReturnQueue:
    """Blocks of one step that are away, in the planned order of their use.

    The next :data:`PREFETCH_LAYERS` keys of the order return ahead of their use, as soon as they
    are permitted and the ring has room. Keys that offload nothing have empty blocks in the order,
    and nothing to bring back.

    Args:
        order: Keys of all blocks of the step, in the order in which compute uses them.
        tier: Tier that the blocks are in.
        ring: Slots of the device that blocks return into.
    """

    def __init__(self, order: Sequence[ActivationKey], tier: HostTier, ring: Slots) -> None:
        self._order, self._tier, self._ring = order, tier, ring
        self._blocks: dict[ActivationKey, Block] = {}
        self._occupants: dict[int, ActivationKey] = {}
        self._permitted: set[ActivationKey] = set()
        self._used = 0
        """Number of keys that compute has got, the first ones of the order."""
        self._fetched = 0
        """Number of keys whose return has begun, the first ones of the order."""

    @property
    def keys(self) -> KeysView[ActivationKey]:
        """Keys of the blocks that are away."""
        return self._blocks.keys()

    @property
    def is_finished(self) -> bool:
        """True if all blocks of the step were used."""
        return self._used == len(self._order)

    @property
    def next_kv(self) -> ActivationKey | None:
        """Key to get next, if it is of K and V that may return; else None."""
        key = None if self.is_finished else self._order[self._used]
        return key if key in self._permitted and key.is_kv else None

    def add(self, block: Block) -> None:
        """Add a block that leaves the device."""
        key = block.key
        assert key not in self._blocks, f"{key} is saved already"
        if block.tensors:
            occupant = self._occupants.setdefault(block.extent.offset_bytes, key)
            assert occupant == key, f"{key} is saved where {occupant} still lies"
        self._blocks[key] = block

    def permit(self, keys: Iterable[ActivationKey]) -> None:
        """Permit the blocks of ``keys`` to return from now on."""
        self._permitted.update(keys)
        self.advance()

    def advance(self) -> None:
        """Enqueue the copies back of the next blocks, as far as there is room for them."""
        self._tier.advance()
        for key in self._order[self._fetched : self._used + PREFETCH_LAYERS]:
            block = self._blocks.get(key)
            if block is None:
                return  # not saved yet: belongs to a later sequence
            if block.tensors:
                if key not in self._permitted or self._ring.next.is_full or self._tier.is_full:
                    return
                block.ring = self._ring.take()
                self._tier.fetch(block)
            self._fetched += 1

    def get(self, key: ActivationKey) -> Block:
        """Remove and return the block to use next, whose copies back are all enqueued."""
        expected = self._order[self._used]
        assert key == expected, f"{key} is taken before {expected}"
        self._used += 1
        self.advance()
        block = self._blocks.pop(key)
        if block.tensors:
            assert self._fetched >= self._used, f"{key} has no ring slot: too many are in use"
            del self._occupants[block.extent.offset_bytes]
            self._tier.finish(block)
            self.advance()
        return block
