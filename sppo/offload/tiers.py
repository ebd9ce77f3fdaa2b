"""Tiers behind the device, and the copies of blocks of offloaded tensors out and back.

Copies keep these orderings with each other and with compute, each by an event. Comments name
them by their numbers where something is made to wait:

1. Compute has written a tensor before it is copied out.
2. A tensor has been copied out before compute reuses its memory.
3. A slot, or an extent of the file, has been filled before it is read.
4. A block is back on the device before compute reads it.
5. Compute has read a ring slot before the next block comes back into it.
6. A staging slot has been copied back before it is filled again.
7. A staging slot has been written to the disk before it is filled again.
8. The disk has been read into a staging slot before that is copied back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sppo.activations.activation_layout import (
    ActivationKey,
    Extent,
    OffloadSchedule,
    packed_offsets,
)
from sppo.activations.tensor_classes import CLASSES, class_of
from sppo.offload.lane import Lane
from sppo.offload.worker_pool import Event


class Slot:
    """Memory that blocks pass through, one after another."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.is_full = False
        """True from when the filling is enqueued until the reading is."""
        self.emptied: list[Event] = []
        """Event, if any, that the next filling waits for: the slot has been read."""

    def empty(self, read: Event) -> None:
        """Give the slot back; the block in it has been read when ``read`` is reached."""
        assert self.is_full, "the slot is read, and nothing is in it"
        self.is_full, self.emptied = False, [read]


class Slots:
    """Memory of a step, cut into slots of equal size that blocks take in turn."""

    def __init__(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        self._slots: deque[Slot] = deque()

    def reserve(self, count: int, slot_bytes: int, allocate: Callable[[int], Tensor]) -> None:
        """Cut memory into empty slots, after allocating it unless there is enough already."""
        if count * slot_bytes > self.data.numel():
            self.release()  # first: both allocations may not fit
            self.data = allocate(count * slot_bytes)
        self._slots = deque(Slot(self.data[i * slot_bytes :][:slot_bytes]) for i in range(count))

    @property
    def is_full(self) -> bool:
        """True if the slot to take next, the least recently used, still holds a block."""
        return self._slots[0].is_full

    def take(self) -> Slot:
        """Take the next slot for a block."""
        assert not self.is_full, "the slot holds what nobody has read yet"
        self._slots.rotate(-1)
        self._slots[-1].is_full = True
        return self._slots[-1]

    def release(self) -> None:
        """Drop the memory and its slots."""
        self.data, self._slots = torch.empty(0, dtype=torch.uint8), deque()


@dataclass(slots=True, eq=False)
class Block:
    """Tensors of one key, packed, and how far they have come on their way out and back."""

    key: ActivationKey
    extent: Extent
    """Place in the tier."""
    tensors: dict[str, tuple[slice, torch.Size, torch.dtype]]
    """Bytes of each tensor within the block, its shape and its dtype."""
    stored: Event = field(init=False)
    """Event that is reached when the block is in the tier."""
    ring: Slot = field(init=False)
    """Slot of the device, from when the block is on its way back."""
    back: Event = field(init=False)
    """Event that is reached when the block is back in ``ring``."""

    def part(self, slot: Slot) -> Tensor:
        """Return the bytes of a slot that the block takes."""
        return slot.data[: self.extent.size_bytes]

    def views(self, data: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of the block's bytes ``data``."""
        return {
            name: data[part].view(dtype).view(shape)
            for name, (part, shape, dtype) in self.tensors.items()
        }

    @property
    def bytes_by_class(self) -> Counter[str]:
        """Bytes of the tensors by their class; K and V count as "kv"."""
        counts: Counter[str] = Counter()
        for name, (part, _, _) in self.tensors.items():
            counts["kv" if self.key.is_kv else CLASSES[class_of(name)]] += part.stop - part.start
        return counts


def pack(key: ActivationKey, extent: Extent, tensors: Mapping[str, Tensor]) -> Block:
    """Return a block for contiguous tensors, of the planned size."""
    offsets, size = packed_offsets({name: tensor.nbytes for name, tensor in tensors.items()})
    assert size == extent.size_bytes, f"{key} moves {size} bytes, planned {extent.size_bytes}"
    parts = {
        name: (slice(offsets[name], offsets[name] + tensor.nbytes), tensor.shape, tensor.dtype)
        for name, tensor in tensors.items()
    }
    return Block(key, extent, parts)


class HostTier:
    """Host memory in which every block has a place of its own.

    Args:
        lane: Lane of the copies.
    """

    disk_bytes = 0
    """Size of the file on the disk."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.host = Slots()
        """Places of the blocks, as one slot that stays empty, or staging slots."""

    def reserve_host(self, schedule: OffloadSchedule) -> None:
        """Reserve the host memory of a step, once no copy is in flight.

        Raises:
            MemoryError: The host lacks memory.
        """
        self.host.reserve(1, schedule.tier_bytes, partial(self._lane.host_memory, "blocks"))

    def reserve_disk(self, schedule: OffloadSchedule) -> None:
        """Reserve the file of a step, if there is one, once no copy is in flight.

        Raises:
            OSError: The disk lacks space.
        """

    def send(self, block: Block, tensors: Mapping[str, Tensor]) -> Event:
        """Enqueue the copies of a block to the tier; return when its tensors are copied out."""
        sources = [*tensors.values()]
        copies = [*zip(block.views(self._place(block)).values(), sources, strict=True)]
        block.stored = self._lane.out(copies, after=[self._lane.computed(sources)])  # ordering 1
        return block.stored

    def fetch(self, block: Block) -> None:
        """Enqueue the copies of a block into its ring slot."""
        copies = [(block.part(block.ring), self._place(block))]
        after = [block.stored, *block.ring.emptied]  # orderings 3 and 5
        block.back = self._lane.back(copies, after=after)

    def advance(self, wanted: Block | None = None) -> None:
        """Enqueue the copies of fetched blocks that have become possible: here, all are already.

        Args:
            wanted: Block whose copies are all to be enqueued now, because compute needs it.
        """

    def _place(self, block: Block) -> Tensor:
        return self.host.data[block.extent.offset_bytes : sum(block.extent)]


class DiskTier(HostTier):
    """File on a disk, to and from which blocks pass through staging slots in host memory.

    A block that returns is read into a staging slot, and copied from there once that is done,
    which :meth:`advance` finds out. Only the copy waits for the ring slot. If device memory is host
    memory, the block is read straight into its ring slot.

    Args:
        lane: Lane of the copies.
        directory: Directory of the file.
    """

    def __init__(self, lane: Lane, directory: Path) -> None:
        super().__init__(lane)
        self._directory = directory
        self._reads: deque[tuple[Block, Slot, Event]] = deque()

    def reserve_host(self, schedule: OffloadSchedule) -> None:
        """Reserve the staging slots of a step, once no copy is in flight."""
        allocate = partial(self._lane.host_memory, "blocks")
        self.host.reserve(schedule.staging_slots, schedule.largest_bytes, allocate)

    def reserve_disk(self, schedule: OffloadSchedule) -> None:
        """Reserve the file of a step, once no copy is in flight."""
        if schedule.tier_bytes > self.disk_bytes:
            self.disk_bytes = 0
            self._lane.file.open(self._directory, schedule.tier_bytes)
            self.disk_bytes = schedule.tier_bytes

    def send(self, block: Block, tensors: Mapping[str, Tensor]) -> Event:
        """Enqueue the copies of a block to the tier; return when its tensors are copied out."""
        while self.host.is_full:
            self._copy_back()
        slot, sources = self.host.take(), [*tensors.values()]
        copies = [*zip(block.views(slot.data).values(), sources, strict=True)]
        after = [self._lane.computed(sources), *slot.emptied]  # orderings 1, and 6 or 7
        copied = self._lane.out(copies, after=after)
        offset, staged = block.extent.offset_bytes, block.part(slot)
        block.stored = self._lane.file.write(offset, staged.numpy(), after=[copied])  # ordering 3
        slot.empty(block.stored)
        return copied

    def fetch(self, block: Block) -> None:
        """Start to read a block, on its way to its ring slot."""
        offset = block.extent.offset_bytes
        if self._lane.reads_to_device:
            after = [block.stored, *block.ring.emptied]  # orderings 3 and 5
            target = block.part(block.ring).numpy()
            block.back = self._lane.file.read(offset, target, after=after)
            return
        slot = self.host.take()
        after = [block.stored, *slot.emptied]  # orderings 3, and 6 or 7
        read = self._lane.file.read(offset, block.part(slot).numpy(), after=after)
        self._reads.append((block, slot, read))

    def advance(self, wanted: Block | None = None) -> None:
        """Copy the blocks back that the disk has been read for, and ``wanted``, the first one."""
        while self._reads and (self._reads[0][0] is wanted or self._reads[0][2].done()):
            self._copy_back()

    def _copy_back(self) -> None:
        """Enqueue the copy into the ring of the block whose read was started first."""
        block, slot, read = self._reads.popleft()
        copies = [(block.part(block.ring), block.part(slot))]
        after = [read, *block.ring.emptied]  # orderings 8 and 5
        block.back = self._lane.back(copies, after=after)
        slot.empty(block.back)
