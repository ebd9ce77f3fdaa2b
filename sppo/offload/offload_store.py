"""Saved tensors that leave the device until backward wants them: out, through the host, and back.

Every key, one layer of one unit, has a block: its offloaded tensors, packed. Blocks, where they lie
in the tier and the order in which backward takes them are given before the step
(:mod:`sppo.activations.activation_layout`); here they only travel. With a host tier each block has
its own slot in host memory. With a disk tier it passes through one of a few staging slots to its
extent of the file, and through another back. On the device, blocks come back into a ring of slots,
a few layers ahead of their use. A layer that offloads nothing still counts as one of those, so that
what comes back never runs ahead of, or behind, the layers it is for.

What must come before what is in :class:`sppo.offload.queues.Ordering`; every copy below names the
events it waits for. Those are all of operations that were enqueued before it, so no two can wait
for each other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.activations.activation_layout import (
    PREFETCH_LAYERS,
    ActivationKey,
    Extent,
    OffloadSchedule,
    packed_offsets,
)
from sppo.activations.tensor_classes import CLASSES, class_of
from sppo.offload.copy_report import CopyReport
from sppo.offload.integrity import Checksums
from sppo.offload.queues import CopyQueues, Event, Ordering
from sppo.offload.slots import Slot, SlotMemory
from sppo.offload.tier import Tier

_NOTHING = OffloadSchedule({}, (), staging_slots=0, ring_slots=0)


class _TensorSlice(NamedTuple):
    """One tensor in a block."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, block: Tensor) -> Tensor:
        """The tensor itself, a view of the block's bytes."""
        data = block[self.offset_bytes : self.offset_bytes + self.size_bytes]
        return data.view(self.dtype).view(self.shape)

    @property
    def size_bytes(self) -> int:
        """Without what aligns the next one."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class _PackedBlock:
    """One that is away."""

    extent: Extent
    slices: dict[str, _TensorSlice]
    stored: Event | None = None
    """Reached when it lies in the tier."""
    host: Slot | None = None
    """Its own, in a host tier."""
    ring: Slot | None = None
    """Where it comes back to, once that is enqueued."""
    back: Event | None = None


class OffloadStore:
    """Store of tensors that leave the device, see also :mod:`sppo.offload.device_stores`.

    On the device it holds nothing but the ring, which :meth:`take_report` counts. What
    :meth:`take` returns is lent out of the ring.

    Args:
        queues: that carry out the copies; closed with the store.
        tier: where blocks wait.
        source_lag: blocks whose tensors may still be on the device, being copied out, when the
            next one is saved. That is how far compute may run ahead of the copies out.
        checksums: verify what comes back; slow.
    """

    def __init__(
        self,
        queues: CopyQueues,
        *,
        tier: Tier,
        source_lag: int = 1,
        checksums: bool = False,
    ) -> None:
        self._queues, self._source_lag = queues, source_lag
        self._checksums = Checksums() if checksums else None
        self._slots = SlotMemory(queues, tier)
        self._offloads, self._step = _NOTHING, 0
        self._out_bytes: Counter[str] = Counter()
        self._back_bytes: Counter[str] = Counter()
        self._begin()

    def prepare(self, schedule: OffloadSchedule) -> None:
        """Make room for a step; nothing may be away.

        Raises:
            MemoryError: host or device have not that much memory.
            OSError: the disk has not that much room.
        """
        assert self.num_entries == 0, "extents of blocks that are away stay as they are"
        self._step += 1
        if schedule is not self._offloads and schedule.largest_bytes > 0:
            self._offloads = _NOTHING  # should there be no room, the next step makes it anew
            self._slots.make_room(schedule)
        self._offloads = schedule
        self._begin()

    def save(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """Send ``tensors`` away; an empty block is a layer that offloads nothing.

        Raises:
            OSError: the disk failed.
        """
        assert key not in self._blocks, f"{key} is saved already"
        self._queues.check()
        extent = self._offloads.extents[key]
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        offsets, size = packed_offsets(
            {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        )
        assert size == extent.size_bytes, f"{key} moves {size} bytes, planned {extent.size_bytes}"
        slices = {
            name: _TensorSlice(offsets[name], tuple(tensor.shape), tensor.dtype)
            for name, tensor in tensors.items()
        }
        block = _PackedBlock(extent, slices)
        if tensors:
            occupant = self._occupied.setdefault(extent.offset_bytes, key)
            assert occupant == key, f"{key} is saved where {occupant} still lies"
            self._count(self._out_bytes, slices)
            if self._checksums is not None:
                self._checksums.note(key, tensors, step=self._step)
            self._send(block, tensors)
        self._blocks[key] = block
        self._unsaved[key[:2]] -= 1

    def finish_offload(self, unit: tuple[int, int]) -> None:
        """Note that ``unit`` is saved whole; its copies out may still be under way."""
        missing = self._unsaved[unit]
        assert not missing, f"{missing} layers of unit {unit} are not saved yet"

    def start_reload(self, unit: tuple[int, int]) -> None:
        """Let ``unit`` come back from now on, as far ahead of its use as the ring has room."""
        self._reloading.add(unit)
        self._bring_back()

    def take(self, key: ActivationKey) -> dict[str, Tensor]:
        """See :class:`sppo.offload.device_stores.ActivationStore`; good until :meth:`release`.

        Raises:
            OSError: the disk failed.
            CorruptActivationError: what came back is not what was sent (with checksums).
        """
        expected = self._offloads.order[self._next_take]
        assert key == expected, f"{key} is taken before {expected}"
        self._next_take += 1
        self._bring_back()
        if self._next_take == len(self._offloads.order):
            self._let_go(0)
        block = self._blocks.pop(key)
        if not block.slices:
            return {}
        assert block.ring is not None, f"{key} has no ring slot: too many are in use"
        assert block.back is not None, "a block in the ring is on its way back"
        self._queues.use(block.ring.region, block.back)
        block.ring.begin_reading()
        del self._occupied[block.extent.offset_bytes]
        self._in_use[key] = block.ring
        self._count(self._back_bytes, block.slices)
        tensors = {name: part.of(block.ring.region.data) for name, part in block.slices.items()}
        if self._checksums is not None:
            self._checksums.check(key, tensors)
        return tensors

    def release(self, key: ActivationKey) -> None:
        """See :class:`sppo.offload.device_stores.ActivationStore`."""
        slot = self._in_use.pop(key, None)
        if slot is None:
            return
        used = self._queues.used(slot.region)
        slot.end_reading(Ordering.USED_BEFORE_RING_REWRITE, used)
        self._bring_back()

    def abort(self) -> None:
        """See :class:`sppo.offload.device_stores.ActivationStore`; copies under way end first."""
        self._queues.abort()
        self._begin()
        self._slots.free()
        if self._checksums is not None:
            self._checksums.clear()

    def take_report(self) -> CopyReport:
        """What was moved since the last call."""
        out_bytes, back_bytes = self._take_counts()
        return replace(
            self._queues.take_times(),
            out_bytes=out_bytes,
            back_bytes=back_bytes,
            host_bytes=self._slots.host_bytes,
            ring_bytes=self._slots.ring_bytes,
            disk_bytes=self._slots.file_bytes,
        )

    def close(self) -> None:
        """End the copies and give memory and file back. Twice is once."""
        self._queues.close()
        self._slots.clear()

    @property
    def num_entries(self) -> int:
        """Keys saved and not yet taken, or taken and not yet released."""
        return len(self._blocks) + len(self._in_use)

    def _send(self, block: _PackedBlock, tensors: dict[str, Tensor]) -> None:
        """Enqueue the way out."""
        extent = block.extent
        host = self._slots.to_fill(extent)
        produced = self._queues.produced(list(tensors.values()))
        copied = self._queues.copy_out(
            host.region,
            [(block.slices[name].offset_bytes, tensor) for name, tensor in tensors.items()],
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
        self._let_go(self._source_lag)

    def _let_go(self, still_held: int) -> None:
        """Give compute the memory of all tensors copied out but those of the last blocks."""
        while len(self._copied) > still_held:
            self._queues.reusable(self._copied.popleft())

    def _bring_back(self) -> None:
        """Enqueue the way back of what is wanted next, as far ahead as the ring has room."""
        order = self._offloads.order
        horizon = min(len(order), self._next_take + PREFETCH_LAYERS)
        while self._next_back < horizon:
            block = self._blocks.get(order[self._next_back])
            if block is None:
                break  # not saved yet: another sequence
            if block.slices:
                if order[self._next_back][:2] not in self._reloading:
                    break
                slot = self._slots.ring[self._brought_back % len(self._slots.ring)]
                if not slot.can_be_filled:
                    break
                self._send_back(block, slot)
                self._brought_back += 1
            self._next_back += 1

    def _send_back(self, block: _PackedBlock, ring: Slot) -> None:
        """Enqueue the way back into ``ring``."""
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
        """As before the first save of a step."""
        self._blocks: dict[ActivationKey, _PackedBlock] = {}
        self._in_use: dict[ActivationKey, Slot] = {}
        self._occupied: dict[int, ActivationKey] = {}
        self._unsaved = Counter(key[:2] for key in self._offloads.extents)
        self._reloading: set[tuple[int, int]] = set()
        self._copied: deque[Event] = deque()
        self._next_take = self._next_back = self._brought_back = 0

    def _count(self, counts: Counter[str], slices: Mapping[str, _TensorSlice]) -> None:
        for name, part in slices.items():
            counts[CLASSES[class_of(name)]] += part.size_bytes

    def _take_counts(self) -> tuple[dict[str, int], dict[str, int]]:
        counts = dict(self._out_bytes), dict(self._back_bytes)
        self._out_bytes.clear()
        self._back_bytes.clear()
        return counts
