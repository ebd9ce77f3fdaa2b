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

from sppo.activations.activation_layout import ActivationKey, Extent, OffloadSchedule
from sppo.activations.block_layout import packed_offsets
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


class Tier:
    """Host memory in which every block has a place of its own, or a file on a disk that has these.

    To a disk, blocks pass through staging slots in host memory. A block that returns from there is
    read into a staging slot, and copied from it once that is done, which :meth:`advance` finds out.
    Only the copy waits for the ring slot. If device memory is host memory, the block is read
    straight into its ring slot.

    Args:
        lane: Lane of the copies.
        disk: Directory of the file; None for host memory.
    """

    def __init__(self, lane: Lane, disk: Path | None) -> None:
        self._lane, self._disk = lane, disk
        self.host = Slots()
        """Staging slots, or one slot that stays empty, with the places of all blocks."""
        self.disk_bytes = 0
        """Size of the file on the disk."""
        self._reads: deque[tuple[Block, Slot, Event]] = deque()

    def reserve_host(self, schedule: OffloadSchedule) -> None:
        """Reserve the host memory of a step, once no copy is in flight.

        Raises:
            MemoryError: The host lacks memory.
        """
        count, size = schedule.staging_slots, schedule.largest_bytes
        if self._disk is None:
            count, size = 1, schedule.tier_bytes
        self.host.reserve(count, size, partial(self._lane.host_memory, "blocks"))

    def reserve(self, schedule: OffloadSchedule) -> None:
        """Reserve the file and the host memory of a step, once no copy is in flight.

        Raises:
            MemoryError: The host lacks memory.
            OSError: The disk lacks space.
        """
        if self._disk is not None and schedule.tier_bytes > self.disk_bytes:
            self.disk_bytes = 0  # first: there is no file if the next one cannot be opened
            self._lane.file.open(self._disk, schedule.tier_bytes)
            self.disk_bytes = schedule.tier_bytes
        self.reserve_host(schedule)

    def send(self, block: Block, tensors: Mapping[str, Tensor]) -> Event:
        """Enqueue the copies of a block to the tier; return when its tensors are copied out."""
        sources, after, slot = [*tensors.values()], list[Event](), None
        if self._disk is not None:
            while self.host.is_full:
                self._copy_back()
            slot = self.host.take()
            after = slot.emptied  # ordering 6 or 7
        place = self._place(block) if slot is None else block.part(slot)
        copies = [*zip(block.views(place).values(), sources, strict=True)]
        copied = self._lane.out(copies, after=[self._lane.computed(sources), *after])  # ordering 1
        block.stored = copied
        if slot is not None:
            offset, staged = block.extent.offset_bytes, place.numpy()
            block.stored = self._lane.file.write(offset, staged, after=[copied])  # ordering 3
            slot.empty(block.stored)
        return copied

    def fetch(self, block: Block) -> None:
        """Start to bring a block to its ring slot."""
        lane, offset = self._lane, block.extent.offset_bytes
        target, after = block.part(block.ring), [block.stored, *block.ring.emptied]
        if self._disk is None:
            block.back = lane.back([(target, self._place(block))], after=after)  # orderings 3, 5
        elif lane.reads_to_device:
            block.back = lane.file.read(offset, target.numpy(), after=after)  # orderings 3, 5
        else:
            slot = self.host.take()
            after = [block.stored, *slot.emptied]  # orderings 3, and 6 or 7
            read = lane.file.read(offset, block.part(slot).numpy(), after=after)
            self._reads.append((block, slot, read))

    def advance(self, wanted: Block | None = None) -> None:
        """Copy the blocks back that the disk has been read for, and ``wanted``, the first one.

        Args:
            wanted: Block whose copies are all to be enqueued now, because compute needs it.
        """
        while self._reads and (self._reads[0][0] is wanted or self._reads[0][2].done()):
            self._copy_back()

    def close(self) -> None:
        """Drop the host memory, and reads that nobody will copy from it, once all copies ended."""
        self._reads.clear()
        self.host.release()

    def _copy_back(self) -> None:
        """Enqueue the copy into the ring of the block whose read was started first."""
        block, slot, read = self._reads.popleft()
        copies = [(block.part(block.ring), block.part(slot))]
        after = [read, *block.ring.emptied]  # orderings 8 and 5
        block.back = self._lane.back(copies, after=after)
        slot.empty(block.back)

    def _place(self, block: Block) -> Tensor:
        """Return the place of a block in host memory."""
        return self.host.data[block.extent.offset_bytes : sum(block.extent)]
