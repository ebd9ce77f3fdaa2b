"""Store of the tensors that layers save: some rows stay on the device, the others leave it.

Rows that stay are kept where they are, in the memory of torch's allocator. On a CPU that gets them
back in reverse order of saving, they are copied to a stack.

The rows that leave of one layer of one unit are packed into one block. The extents of the blocks
in the tier, and the order in which backward uses them, are planned before the step
(:mod:`sppo.activations.activation_layout`); the store only starts the copies. With a host tier,
each block has a slot of its own in host memory. With a disk, each block passes through one of a few
staging slots to its extent of the file, and back through a staging slot, or straight into the ring
if device memory is host memory. On the device, blocks return into a ring of slots, a few blocks
ahead of their use. A layer that offloads nothing counts as one block of this distance. If K and V
are offloaded too, in blocks of their own, the distance is half as many layers.

Copies keep these orderings with each other and with compute, each by an event:

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sppo.activations.activation_layout import (
    MAX_BLOCKS_IN_FLIGHT_OUT,
    PREFETCH_LAYERS,
    ActivationKey,
    Extent,
    OffloadSchedule,
    packed_offsets,
)
from sppo.activations.tensor_classes import CLASSES, class_of
from sppo.offload.copy_report import CopyReport
from sppo.offload.held_bytes import HeldBytes
from sppo.offload.integrity import Checksums
from sppo.offload.lane import Event, Lane
from sppo.offload.retained import RetainedTensors, TensorStack, copied, on_its_own

_NOTHING = OffloadSchedule({}, (), staging_slots=0, ring_slots=0)
POISON = 0xFF
"""Byte to fill released memory with, in debugging: NaN in every floating dtype."""


class Slot:
    """Memory that blocks pass through, one after another."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.is_full = False
        """True from when the filling is enqueued until the reading is."""
        self._emptied: Event | None = None

    def fill(self) -> list[Event]:
        """Take the slot for a block; return the event that its filling must wait for, if any."""
        assert not self.is_full, "the slot holds what nobody has read yet"
        self.is_full = True
        return [] if self._emptied is None else [self._emptied]

    def empty(self, read: Event) -> None:
        """Give the slot back; the block has been read when ``read`` is reached."""
        assert self.is_full, "the slot is read, and nothing is in it"
        self.is_full, self._emptied = False, read


@dataclass(slots=True)
class _PackedBlock:
    """Packed block of the tensors of one key, and the state of its copies."""

    extent: Extent
    tensors: dict[str, tuple[slice, torch.Size, torch.dtype]]
    """Bytes of each tensor within the block, its shape and its dtype."""
    stored: Event | None = None
    """Event that is reached when the block is in the tier."""
    host: Slot | None = None
    """Host slot of the block; None while it is on a disk only."""
    ring: Slot | None = None
    """Ring slot of the block; None until the block is on its way back."""
    back: Event | None = None
    """Event that is reached when the block is back in ``ring``."""

    def unpack(self, data: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of the block's bytes."""
        return {
            name: data[part].view(dtype).view(shape)
            for name, (part, shape, dtype) in self.tensors.items()
        }


class BlockStore:
    """Store of the saved tensors of one rank; every key is put once and got once.

    Args:
        lane: Lane of the copies, closed with the store; None if all tensors stay on the device.
        disk: Directory of a disk to write blocks to; None keeps them in host memory.
        source_lag: Most layers whose copies out may be in flight when the next layer is saved: how
            far compute may run ahead of the copies.
        debug: Verify checksums of all tensors that return, and overwrite slots of the ring after
            their use; slow.
    """

    def __init__(
        self,
        lane: Lane | None = None,
        *,
        disk: Path | None = None,
        source_lag: int = MAX_BLOCKS_IN_FLIGHT_OUT - 1,
        debug: bool = False,
    ) -> None:
        self._lane_if_any, self._disk, self._source_lag, self._debug = lane, disk, source_lag, debug
        self._retained = RetainedTensors()
        self._checksums = Checksums() if debug else None
        self._memory: dict[str, Tensor] = {}
        self._slot_bytes = self._file_bytes = 0
        self._staging: list[Slot] = []
        self._ring: list[Slot] = []
        self._offloads, self._step = _NOTHING, 0
        self._out_bytes: Counter[str] = Counter()
        self._back_bytes: Counter[str] = Counter()
        self._begin()

    def keep_in_stack(self, *, poison: bool) -> None:
        """Copy tensors that stay onto a stack: keys are got in reverse order of putting.

        Args:
            poison: Overwrite tensors with NaN when they are freed, so that a late reader gets NaN.
        """
        self._retained = TensorStack(poison=poison)

    @property
    def held(self) -> HeldBytes:
        """Bytes of the tensors that stay on the device; the caller adds those of its own."""
        return self._retained.held

    def reserve(self, retained_bytes: int) -> None:
        """Reserve the stack, if any, for ``retained_bytes`` of tensors; call between steps.

        Raises:
            MemoryError: The machine lacks memory.
        """
        self._retained.reserve(retained_bytes)

    def reserve_host(self, schedule: OffloadSchedule) -> None:
        """Take the host memory of a step, which page-locking makes slow, before the first step.

        Raises:
            MemoryError: The host lacks memory.
        """
        if not schedule.largest_bytes:
            return
        slot_bytes = max(self._slot_bytes, schedule.largest_bytes)
        staging_bytes = schedule.staging_slots * slot_bytes
        host_bytes = schedule.tier_bytes if self._disk is None else staging_bytes
        self._take("host", host_bytes, take=partial(self._lane.host_memory, "blocks"))

    def prepare(self, schedule: OffloadSchedule) -> None:
        """Reserve memory and disk space for a step; call between steps.

        Raises:
            MemoryError: The host or the device lacks memory.
            OSError: The disk lacks space.
            RuntimeError: The device has not finished the copies of an earlier step.
        """
        assert not self._blocks, "extents of blocks that are away stay as they are"
        assert not self._in_use, "slots of blocks that are in use stay as they are"
        self._step += 1
        if schedule is not self._offloads and schedule.largest_bytes > 0:
            self._offloads = _NOTHING  # so that the next step tries again if this fails
            self._make_room(schedule)
        self._offloads = schedule
        self._begin()

    @property
    def offloads(self) -> bool:
        """True if tensors can leave the device."""
        return self._lane_if_any is not None

    def put(
        self,
        key: ActivationKey,
        *,
        retained: dict[str, Tensor] | None = None,
        offloaded: dict[str, Tensor] | None = None,
    ) -> None:
        """Save tensors, to which the caller must keep no reference.

        Args:
            key: Key of the tensors.
            retained: Tensors that stay on the device; None for none. A view of a larger tensor does
                not keep the memory of the larger tensor.
            offloaded: Tensors that leave the device, whose copies are started; empty if the block
                of the key is planned to be empty, None if none is planned.

        Raises:
            OSError: The disk failed in an earlier copy.
        """
        if retained is not None:
            self._retained.put(key, retained)
        if self._lane_if_any is not None and offloaded is not None:
            self._put_away(key, offloaded)

    def _put_away(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """Start to copy ``tensors`` out; the dictionary may be empty."""
        assert key not in self._blocks, f"{key} is saved already"
        self._lane.check()
        extent = self._offloads.extents[key]
        # On a GPU, sources live until they are copied, and a view would keep its whole base alive.
        tensors = {
            name: on_its_own(tensor.contiguous()) if tensor.is_cuda else tensor.contiguous()
            for name, tensor in tensors.items()
        }
        offsets, size = packed_offsets({name: tensor.nbytes for name, tensor in tensors.items()})
        assert size == extent.size_bytes, f"{key} moves {size} bytes, planned {extent.size_bytes}"
        block = self._blocks[key] = _PackedBlock(
            extent,
            {
                name: (slice(start, start + tensor.nbytes), tensor.shape, tensor.dtype)
                for (name, tensor), start in zip(tensors.items(), offsets.values(), strict=True)
            },
        )
        if tensors:
            occupant = self._occupied.setdefault(extent.offset_bytes, key)
            assert occupant == key, f"{key} is saved where {occupant} still lies"
            _count(self._out_bytes, key, block)
            if self._checksums is not None:
                self._checksums.note(key, tensors, step=self._step)
            self._send(block, tensors)

    def permit(self, keys: Iterable[ActivationKey]) -> None:
        """Permit the blocks of ``keys`` to return from now on, as ring slots become free."""
        self._permitted.update(keys)
        self._bring_back()

    @property
    def next_kv(self) -> ActivationKey | None:
        """Key to get next, if it is of K and V that may return; else None."""
        order = self._offloads.order
        if self._next_use == len(order):
            return None
        key = order[self._next_use]
        return key if key.is_kv and key in self._permitted else None

    def get(
        self, key: ActivationKey, *, owned: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the (offloaded, retained) tensors of ``key``, valid until :meth:`free`.

        Compute waits for offloaded tensors, whose keys must be got in the planned order.

        Args:
            key: Key of the tensors.
            owned: Copy tensors whose memory :meth:`free` gives back, because the caller keeps them.

        Raises:
            OSError: The disk failed.
            CorruptActivationError: In debugging: a tensor was altered.
        """
        is_retained = key in self._retained.keys
        assert is_retained or key in self._blocks, f"{key} is not saved"
        offloaded = self._get_back(key) if key in self._blocks else {}
        retained = self._retained.get(key, owned=owned) if is_retained else {}
        return copied(offloaded) if owned else offloaded, retained

    def peek(self, key: ActivationKey, name: str) -> Tensor | None:
        """Return one retained tensor, which stays in the store; None if it is not saved."""
        return self._retained.peek(key, name)

    def _get_back(self, key: ActivationKey) -> dict[str, Tensor]:
        """Return the tensors of ``key`` as views of the ring."""
        expected = self._offloads.order[self._next_use]
        assert key == expected, f"{key} is taken before {expected}"
        self._next_use += 1
        self._bring_back()
        if self._next_use == len(self._offloads.order):
            self._let_go(0)
        block = self._blocks.pop(key)
        if not block.tensors:
            return {}
        if block.back is None:
            assert block.ring is not None, f"{key} has no ring slot: too many are in use"
            self._copy_back()  # keys are read in the order of use: this is the first
            self._bring_back()
        assert block.back is not None, "what is read first is used first"
        assert block.ring is not None, "a block in the ring is on its way back"
        self._lane.before_compute(block.back)
        del self._occupied[block.extent.offset_bytes]
        self._in_use[key] = block.ring
        _count(self._back_bytes, key, block)
        tensors = block.unpack(block.ring.data)
        if self._checksums is not None:
            self._checksums.check(key, tensors)
        return tensors

    def free(self, key: ActivationKey) -> None:
        """Allow reuse of the memory of ``key``, after all compute that reads it was issued."""
        self._retained.free(key)
        slot = self._in_use.pop(key, None)
        if slot is None:
            return
        if self._debug:
            slot.data.fill_(POISON)
        slot.empty(self._lane.computed([slot.data]))
        self._bring_back()

    def drain(self) -> bool:
        """Wait for the copies of a failed step, and drop all entries.

        Returns:
            Whether all copies have ended; if not, they may still use their memory, which is kept.
        """
        if self._lane_if_any is not None and not self._lane_if_any.drain():
            return False
        self._begin()
        self._retained.clear()
        self._staging = [Slot(slot.data) for slot in self._staging]
        self._ring = [Slot(slot.data) for slot in self._ring]
        self._out_bytes.clear()
        self._back_bytes.clear()
        if self._checksums is not None:
            self._checksums.clear()
        return True

    def take_report(self) -> CopyReport:
        """Return bytes and times of the copies since the last call, and the reserved memory."""
        if self._lane_if_any is None:
            return CopyReport()
        out_bytes, back_bytes = dict(self._out_bytes), dict(self._back_bytes)
        self._out_bytes.clear()
        self._back_bytes.clear()
        reserved = {place: memory.numel() for place, memory in self._memory.items()}
        return replace(
            self._lane.take_times(),
            out_bytes=out_bytes,
            back_bytes=back_bytes,
            host_bytes=reserved.get("host", 0),
            device_bytes=reserved.get("ring", 0),
            disk_bytes=self._file_bytes,
        )

    def close(self) -> None:
        """End all copies and free memory and file; repeated calls do nothing."""
        if self._lane_if_any is not None:
            self._lane_if_any.close()
        self._memory.clear()
        self._staging, self._ring = [], []

    @property
    def num_entries(self) -> int:
        """Number of keys put and not yet got, or whose slots are not yet freed."""
        return len(self._retained.keys | self._blocks.keys()) + len(self._in_use)

    @property
    def _lane(self) -> Lane:
        assert self._lane_if_any is not None, "what leaves the device has a lane"
        return self._lane_if_any

    def _send(self, block: _PackedBlock, tensors: Mapping[str, Tensor]) -> None:
        """Enqueue the copies of ``block`` to the tier."""
        extent, sources = block.extent, [*tensors.values()]
        host = self._host_slot(extent)
        copies = [
            (host.data[part].view(source.dtype).view(source.shape), source)
            for (part, _, _), source in zip(block.tensors.values(), sources, strict=True)
        ]
        after = [self._lane.computed(sources), *host.fill()]
        block.stored = copied = self._lane.out(copies, after=after)
        if self._disk is None:
            block.host = host
        else:
            data = host.data[: extent.size_bytes]
            block.stored = self._lane.write(extent.offset_bytes, data, after=[copied])
            host.empty(block.stored)
        self._copied.append((copied, sources))
        self._let_go(self._source_lag * self._blocks_of_layer)

    def _let_go(self, still_held: int) -> None:
        """Let compute reuse the sources of all copies out except the last ``still_held``."""
        while len(self._copied) > still_held:
            self._lane.before_compute(self._copied[0][0])
            self._copied.popleft()

    def _bring_back(self) -> None:
        """Enqueue the copies back of the next blocks, as far as ring slots are free."""
        while self._reading and self._reading[0][1].done():
            self._copy_back()
        order = self._offloads.order
        horizon = min(len(order), self._next_use + PREFETCH_LAYERS)
        while self._next_back < horizon:
            key = order[self._next_back]
            block = self._blocks.get(key)
            if block is None:
                break  # not saved yet: belongs to a later sequence
            if block.tensors:
                ring = self._ring[self._brought_back % len(self._ring)]
                is_staging_full = bool(self._reading) and self._next_staging.is_full
                if key not in self._permitted or ring.is_full or is_staging_full:
                    break
                self._fetch(block, ring)
                self._brought_back += 1
            self._next_back += 1

    def _fetch(self, block: _PackedBlock, ring: Slot) -> None:
        """Enqueue the copy of ``block`` into ``ring``, or with a disk its read."""
        assert block.stored is not None, "a block is stored before it comes back"
        offset, size = block.extent
        block.ring, after = ring, [block.stored, *ring.fill()]
        if block.host is not None:
            copies = [(ring.data[:size], block.host.data[:size])]
            block.back = self._lane.back(copies, after=after)
            block.host.empty(block.back)
        elif self._lane.reads_to_device:
            block.back = self._lane.read(offset, ring.data[:size], after=after)
        else:
            block.host = self._host_slot(block.extent)
            stored, *free = after
            read = self._lane.read(
                offset, block.host.data[:size], after=[stored, *block.host.fill()]
            )
            self._reading.append((block, read, free))

    def _copy_back(self) -> None:
        """Enqueue the copy into the ring of the block whose read was started first."""
        block, read, free = self._reading.popleft()
        assert block.host is not None, "the disk is read into a slot"
        assert block.ring is not None, "the block has a slot of the ring"
        size = block.extent.size_bytes
        copies = [(block.ring.data[:size], block.host.data[:size])]
        block.back = self._lane.back(copies, after=[read, *free])
        block.host.empty(block.back)

    def _host_slot(self, extent: Extent) -> Slot:
        """Return a host slot for a block: with a disk, the least recently used staging slot.

        In a host tier, compute has waited for the block that came back from there before.
        """
        if self._disk is None:
            return Slot(self._memory["host"][extent.offset_bytes : sum(extent)])
        slot = self._next_staging
        self._staged += 1
        while slot.is_full:
            self._copy_back()
        return slot

    @property
    def _next_staging(self) -> Slot:
        return self._staging[self._staged % len(self._staging)]

    def _make_room(self, schedule: OffloadSchedule) -> None:
        """Free all slots, and replace memory and file if they are too small for ``schedule``."""
        if not self._lane.drain():
            raise RuntimeError(
                "the device does not answer, and may still copy to and from the memory of "
                "offloaded tensors: the step cannot start"
            )
        slot_bytes = max(self._slot_bytes, schedule.largest_bytes)
        if self._disk is not None and schedule.tier_bytes > self._file_bytes:
            self._file_bytes = 0
            self._lane.open_file(self._disk, schedule.tier_bytes)
            self._file_bytes = schedule.tier_bytes
        self._staging, self._ring = [], []
        self.reserve_host(schedule)
        self._take("ring", schedule.ring_slots * slot_bytes, take=self._lane.device_memory)
        self._slot_bytes = slot_bytes
        if self._disk is not None:
            self._staging = self._cut("host", schedule.staging_slots)
        self._ring = self._cut("ring", schedule.ring_slots)

    def _take(self, place: str, size_bytes: int, *, take: Callable[[int], Tensor]) -> None:
        """Take the memory of a place, unless there is enough already."""
        if place in self._memory and self._memory[place].numel() >= size_bytes:
            return
        self._memory.pop(place, None)  # free first: both allocations may not fit
        self._memory[place] = take(size_bytes)

    def _cut(self, place: str, count: int) -> list[Slot]:
        data, size = self._memory[place], self._slot_bytes
        return [Slot(data[i * size : (i + 1) * size]) for i in range(count)]

    def _begin(self) -> None:
        """Reset the store to its state before the first block of a step."""
        self._blocks: dict[ActivationKey, _PackedBlock] = {}
        self._in_use: dict[ActivationKey, Slot] = {}
        self._occupied: dict[int, ActivationKey] = {}
        self._permitted: set[ActivationKey] = set()
        self._copied: deque[tuple[Event, list[Tensor]]] = deque()
        self._reading: deque[tuple[_PackedBlock, Event, list[Event]]] = deque()
        self._staged = self._next_use = self._next_back = self._brought_back = 0
        # K and V are saved as a block of their own, before the block of their layer.
        self._blocks_of_layer = 1 + any(key.is_kv for key in self._offloads.extents)


def _count(counts: Counter[str], key: ActivationKey, block: _PackedBlock) -> None:
    """Add the bytes of a block's tensors to the counts of their classes; K and V count as "kv"."""
    for name, (part, _, _) in block.tensors.items():
        counts["kv" if key.is_kv else CLASSES[class_of(name)]] += part.stop - part.start
