"""Store of saved tensors that leave the device after forward and return before backward.

The offloaded tensors of one layer of one unit are packed into one block. The extents of the blocks
in the tier, and the order in which backward takes them, are planned before the step
(:mod:`sppo.activations.activation_layout`); the store only starts the copies. With a host tier,
each block has a slot of its own in host memory. With a disk, each block passes through one of a few
staging slots to its extent of the file, and back through a staging slot. On the device, blocks
return into a ring of slots, a few blocks ahead of their use. A layer that offloads nothing counts
as one block of this distance. If K and V are offloaded too, in blocks of their own, the distance is
half as many layers.

:class:`sppo.offload.queues.copy_queues.Ordering` lists the required orderings, and every copy below
names the events that it waits for. These events belong to copies enqueued earlier, so copies cannot
deadlock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from sppo.offload.device_stores import on_its_own
from sppo.offload.integrity import Checksums
from sppo.offload.queues.copy_queues import CopyQueues, Event, Ordering
from sppo.offload.slots import Slot, SlotMemory

_NOTHING = OffloadSchedule({}, (), staging_slots=0, ring_slots=0)


@dataclass(slots=True)
class _PackedBlock:
    """Packed block of the tensors of one key, and the state of its copies."""

    extent: Extent
    tensors: dict[str, tuple[slice, torch.Size, torch.dtype]]
    """Bytes of each tensor within the block, its shape and its dtype."""
    stored: Event | None = None
    """Event that is reached when the block is in the tier."""
    host: Slot | None = None
    """Slot of the block in a host tier; None with a disk."""
    ring: Slot | None = None
    """Ring slot of the block; None until the copy back is enqueued."""
    back: Event | None = None
    """Event that is reached when the block is back in ``ring``."""

    def unpack(self, data: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of the block's bytes."""
        return {
            name: data[part].view(dtype).view(shape)
            for name, (part, shape, dtype) in self.tensors.items()
        }


class OffloadStore:
    """Store of saved tensors that leave the device.

    On the device the store owns only the ring, which :meth:`take_report` counts; :meth:`take`
    returns views of the ring. :mod:`sppo.offload.device_stores` has the stores of other tensors.

    Args:
        queues: Copy queues, closed with the store.
        disk: Directory of a disk to write blocks to; None keeps them in host memory.
        source_lag: Most layers whose copies out may be in flight when the next layer is saved: how
            far compute may run ahead of the copies.
        checksums: Verify all tensors that return; slow.
    """

    def __init__(
        self,
        queues: CopyQueues,
        *,
        disk: Path | None = None,
        source_lag: int = MAX_BLOCKS_IN_FLIGHT_OUT - 1,
        checksums: bool = False,
    ) -> None:
        self._queues, self._source_lag = queues, source_lag
        self._checksums = Checksums() if checksums else None
        self._slots = SlotMemory(queues, disk)
        self._offloads, self._step = _NOTHING, 0
        self._out_bytes: Counter[str] = Counter()
        self._back_bytes: Counter[str] = Counter()
        self._begin()

    def reserve_host(self, schedule: OffloadSchedule) -> None:
        """Take the host memory of a step, which page-locking makes slow, before the first step.

        Raises:
            MemoryError: The host lacks memory.
        """
        if schedule.largest_bytes > 0:
            self._slots.reserve_host(schedule)

    def prepare(self, schedule: OffloadSchedule) -> None:
        """Reserve memory and disk space for a step; call between steps.

        Raises:
            MemoryError: The host or the device lacks memory.
            OSError: The disk lacks space.
            RuntimeError: The device has not finished the copies of an earlier step.
        """
        assert self.num_entries == 0, "extents of blocks that are away stay as they are"
        self._step += 1
        if schedule is not self._offloads and schedule.largest_bytes > 0:
            self._offloads = _NOTHING  # so that the next step tries again if this fails
            self._slots.make_room(schedule)
        self._offloads = schedule
        self._begin()

    def save(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """Start to copy ``tensors`` out; the dictionary may be empty.

        Raises:
            OSError: The disk failed in an earlier copy.
        """
        assert key not in self._blocks, f"{key} is saved already"
        self._queues.check()
        extent = self._offloads.extents[key]
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        offsets, size = packed_offsets({name: tensor.nbytes for name, tensor in tensors.items()})
        assert size == extent.size_bytes, f"{key} moves {size} bytes, planned {extent.size_bytes}"
        block = _PackedBlock(
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
        self._blocks[key] = block

    def finish_offload(self, keys: Iterable[ActivationKey]) -> None:
        """Assert that all of ``keys`` are saved; their copies out may still be in flight."""
        missing = [key for key in keys if key not in self._blocks]
        assert not missing, f"{missing} are not saved yet"

    def start_reload(self, keys: Iterable[ActivationKey]) -> None:
        """Permit the blocks of ``keys`` to return from now on, as ring slots become free."""
        self._reloading.update(keys)
        self._bring_back()

    @property
    def next_kv(self) -> ActivationKey | None:
        """Key to take next, if it is of K and V that may return; else None."""
        order = self._offloads.order
        if self._next_take == len(order):
            return None
        key = order[self._next_take]
        return key if key.is_kv and key in self._reloading else None

    def take(self, key: ActivationKey) -> dict[str, Tensor]:
        """Return the tensors of ``key``, which must be the next in the planned order.

        The tensors are views of the ring, valid until :meth:`release`. Compute waits for them.

        Raises:
            OSError: The disk failed.
            CorruptActivationError: With checksums: a tensor was altered.
        """
        expected = self._offloads.order[self._next_take]
        assert key == expected, f"{key} is taken before {expected}"
        self._next_take += 1
        self._bring_back()
        if self._next_take == len(self._offloads.order):
            self._let_go(0)
        block = self._blocks.pop(key)
        if not block.tensors:
            return {}
        assert block.ring is not None, f"{key} has no ring slot: too many are in use"
        assert block.back is not None, "a block in the ring is on its way back"
        self._queues.use(block.ring.region, block.back)
        block.ring.begin_reading()
        del self._occupied[block.extent.offset_bytes]
        self._in_use[key] = block.ring
        _count(self._back_bytes, key, block)
        tensors = block.unpack(block.ring.region.data)
        if self._checksums is not None:
            self._checksums.check(key, tensors)
        return tensors

    def release(self, key: ActivationKey) -> None:
        """Free the ring slot of ``key``, after all compute that reads the tensors was issued."""
        slot = self._in_use.pop(key, None)
        if slot is None:
            return
        used = self._queues.used(slot.region)
        slot.end_reading(Ordering.USED_BEFORE_RING_REWRITE, used)
        self._bring_back()

    def drain(self) -> bool:
        """Wait for the copies of a failed step, and drop all entries.

        Returns:
            Whether all copies have ended; if not, they may still use their memory, which is kept.
        """
        done = self._queues.abort()
        self._begin()
        self._slots.free()
        self._out_bytes.clear()
        self._back_bytes.clear()
        if self._checksums is not None:
            self._checksums.clear()
        return done

    def take_report(self) -> CopyReport:
        """Return bytes and times of the copies since the last call, and the reserved memory."""
        out_bytes, back_bytes = dict(self._out_bytes), dict(self._back_bytes)
        self._out_bytes.clear()
        self._back_bytes.clear()
        return replace(
            self._queues.take_times(),
            out_bytes=out_bytes,
            back_bytes=back_bytes,
            host_bytes=self._slots.host_bytes,
            device_bytes=self._slots.ring_bytes,
            disk_bytes=self._slots.file_bytes,
        )

    def close(self) -> None:
        """End all copies and free memory and file; repeated calls do nothing."""
        self._queues.close()
        self._slots.clear()

    @property
    def num_entries(self) -> int:
        """Number of keys saved and not yet released."""
        return len(self._blocks) + len(self._in_use)

    def _send(self, block: _PackedBlock, tensors: dict[str, Tensor]) -> None:
        """Enqueue the copies of ``block`` to the tier."""
        extent = block.extent
        host = self._slots.to_fill(extent)
        # On a GPU, sources live until they are copied, and a view would keep its whole base alive.
        tensors = {name: on_its_own(t) if t.is_cuda else t for name, t in tensors.items()}
        produced = self._queues.produced(list(tensors.values()))
        copied = self._queues.copy_out(
            host.region,
            [(block.tensors[name][0].start, tensor) for name, tensor in tensors.items()],
            after=[(Ordering.PRODUCED_BEFORE_OUT, produced), *host.before_filling()],
        )
        host.fill(copied)
        block.stored = copied
        if self._slots.on_disk:
            host.begin_reading()
            block.stored = self._queues.write(
                extent.offset_bytes,
                host.region,
                extent.size_bytes,
                after=[(Ordering.FILLED_BEFORE_READ, copied)],
            )
            host.end_reading(Ordering.WRITTEN_BEFORE_SLOT_REUSE, block.stored)
        else:
            block.host = host
        self._copied.append(copied)
        self._let_go(self._source_lag * self._blocks_of_layer)

    def _let_go(self, still_held: int) -> None:
        """Let compute reuse the sources of all copies out except the last ``still_held``."""
        while len(self._copied) > still_held:
            self._queues.reusable(self._copied.popleft())

    def _bring_back(self) -> None:
        """Enqueue the copies back of the next blocks, as far as ring slots are free."""
        order = self._offloads.order
        horizon = min(len(order), self._next_take + PREFETCH_LAYERS)
        while self._next_back < horizon:
            block = self._blocks.get(order[self._next_back])
            if block is None:
                break  # not saved yet: belongs to a later sequence
            if block.tensors:
                if order[self._next_back] not in self._reloading:
                    break
                slot = self._slots.ring[self._brought_back % len(self._slots.ring)]
                if not slot.can_be_filled:
                    break
                self._send_back(block, slot)
                self._brought_back += 1
            self._next_back += 1

    def _send_back(self, block: _PackedBlock, ring: Slot) -> None:
        """Enqueue the copies of ``block`` from the tier into ``ring``."""
        assert block.stored is not None, "a block is stored before it comes back"
        extent, host = block.extent, block.host
        ready = (Ordering.FILLED_BEFORE_READ, block.stored)
        if host is None:
            host = self._slots.to_fill(extent)
            read = self._queues.read(
                host.region,
                extent.offset_bytes,
                extent.size_bytes,
                after=[ready, *host.before_filling()],
            )
            host.fill(read)
            ready = (Ordering.READ_BEFORE_BACK, read)
        host.begin_reading()
        block.back = self._queues.copy_back(
            ring.region, host.region, extent.size_bytes, after=[ready, *ring.before_filling()]
        )
        host.end_reading(Ordering.BACK_BEFORE_SLOT_REWRITE, block.back)
        ring.fill(block.back)
        block.ring = ring

    def _begin(self) -> None:
        """Reset the store to its state before the first save of a step."""
        self._blocks: dict[ActivationKey, _PackedBlock] = {}
        self._in_use: dict[ActivationKey, Slot] = {}
        self._occupied: dict[int, ActivationKey] = {}
        self._reloading: set[ActivationKey] = set()
        self._copied: deque[Event] = deque()
        self._next_take = self._next_back = self._brought_back = 0
        # K and V are saved as a block of their own, before the block of their layer.
        self._blocks_of_layer = 1 + any(key.is_kv for key in self._offloads.extents)


def _count(counts: Counter[str], key: ActivationKey, block: _PackedBlock) -> None:
    """Add the bytes of a block's tensors to the counts of their classes; K and V count as "kv"."""
    for name, (part, _, _) in block.tensors.items():
        counts["kv" if key.is_kv else CLASSES[class_of(name)]] += part.stop - part.start
