"""Saved tensors that leave the device until backward wants them: out, through the host, and back.

Every key, one layer of one unit, has a parcel: its moved tensors, packed. Parcels, their places in
the tier and the order in which backward takes them are given before the step; here they only
travel. With a host tier each parcel has its own slot in host memory. With a disk tier it passes
through one of a few staging slots to its place in the file, and through another back. On the
device, parcels come back into a ring of slots, a few layers ahead of their use. A layer that moves
nothing still counts as one of those, so that what comes back never runs ahead of, or behind, the
layers it is for.

What must come before what is in :class:`sppo.offload.queues.Ordering`; every copy below names the
events it waits for. Those are all of operations that were enqueued before it, so no two can wait
for each other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.activations.activation_layout import ActivationKey, Extent, OffloadSchedule
from sppo.activations.block_layout import PREFETCH_LAYERS, packed_offsets
from sppo.offload.copy_report import CopyReport, class_of
from sppo.offload.integrity import Checksums
from sppo.offload.queues import CopyQueues, Event, Ordering, Region
from sppo.offload.slots import Slot
from sppo.offload.tiers import Tier

_NOWHERE = OffloadSchedule({}, (), staging_slots=0, ring_slots=0)


class _TensorSlice(NamedTuple):
    """One tensor in a parcel."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _Block:
    """One that is away."""

    place: Extent
    pieces: dict[str, _TensorSlice]
    stored: Event | None = None
    """Reached when it lies in the tier."""
    host: Slot | None = None
    """Its own, in a host tier."""
    ring: Slot | None = None
    """Where it comes back to, once that is enqueued."""
    back: Event | None = None


class OffloadStore:
    """Takes, gives back and forgets tensors as a :class:`sppo.offload.store.ActivationStore` does.

    On the device it holds nothing but the ring, which :meth:`take_report` counts. What
    :meth:`take` returns is lent out of the ring.

    Args:
        queues: that carry out the copies; closed with the store.
        tier: where parcels wait.
        source_lag: parcels whose tensors may still be on the device, being copied out, when the
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
        self._queues, self._tier, self._source_lag = queues, tier, source_lag
        self._checksums = Checksums() if checksums else None
        self._offloads = _NOWHERE
        self._memory: dict[str, Tensor] = {}
        self._file_bytes = self._slot_bytes = self._step = 0
        self._staging: list[Slot] = []
        self._staged = 0
        self._ring: list[Slot] = []
        self._own_slots: dict[int, Slot] = {}
        self._out_bytes: Counter[str] = Counter()
        self._back_bytes: Counter[str] = Counter()
        self._begin()

    def prepare(self, schedule: OffloadSchedule) -> None:
        """Make room for a step; nothing may be away.

        Raises:
            MemoryError: host or device have not that much memory.
            OSError: the disk has not that much room.
        """
        assert self.num_entries == 0, "places of parcels that are away stay as they are"
        self._step += 1
        if schedule is not self._offloads and schedule.largest_bytes > 0:
            self._make_room(schedule)
        self._offloads = schedule
        self._begin()

    def save(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """Send ``tensors`` away; an empty parcel is a layer that moves nothing.

        Raises:
            OSError: the disk failed.
        """
        assert key not in self._blocks, f"{key} is saved already"
        self._queues.check()
        place = self._offloads.extents[key]
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        offsets, size = packed_offsets(
            {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        )
        assert size == place.size_bytes, f"{key} moves {size} bytes, planned {place.size_bytes}"
        pieces = {
            name: _TensorSlice(offsets[name], tuple(tensor.shape), tensor.dtype)
            for name, tensor in tensors.items()
        }
        block = _Block(place, pieces)
        if tensors:
            occupant = self._occupied.setdefault(place.offset_bytes, key)
            assert occupant == key, f"{key} is saved where {occupant} still lies"
            self._count(self._out_bytes, pieces)
            if self._checksums is not None:
                self._checksums.note(key, tensors, step=self._step)
            self._send(block, tensors)
        self._blocks[key] = block
        self._bring_back()

    def take(self, key: ActivationKey) -> dict[str, Tensor]:
        """See :class:`sppo.offload.store.ActivationStore`; good until :meth:`release`.

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
        if not block.pieces:
            return {}
        assert block.ring is not None, f"{key} has no ring slot: too many are in use"
        assert block.back is not None, "a parcel in the ring is on its way back"
        self._queues.use(block.ring.region, block.back)
        block.ring.begin_reading()
        del self._occupied[block.place.offset_bytes]
        self._in_use[key] = block.ring
        self._count(self._back_bytes, block.pieces)
        tensors = {
            name: _view(block.ring.region.data, piece) for name, piece in block.pieces.items()
        }
        if self._checksums is not None:
            self._checksums.check(key, tensors)
        return tensors

    def release(self, key: ActivationKey) -> None:
        """See :class:`sppo.offload.store.ActivationStore`."""
        slot = self._in_use.pop(key, None)
        if slot is None:
            return
        used = self._queues.used(slot.region)
        slot.end_reading(Ordering.USED_BEFORE_RING_REWRITE, used)
        self._bring_back()

    def abort(self) -> None:
        """See :class:`sppo.offload.store.ActivationStore`; copies under way end first."""
        self._queues.abort()
        self._begin()
        self._free_slots()
        if self._checksums is not None:
            self._checksums.clear()

    def take_report(self) -> CopyReport:
        """What was moved since the last call."""
        times = self._queues.take_times()
        sizes = {place: memory.numel() for place, memory in self._memory.items()}
        out_bytes, back_bytes = self._take_counts()
        return CopyReport(
            out_bytes,
            back_bytes,
            out_s=times.out_s,
            back_s=times.back_s,
            exposed_s=times.exposed_s,
            host_bytes=sizes.get("host", 0),
            ring_bytes=sizes.get("ring", 0),
            disk_bytes=self._file_bytes,
        )

    def close(self) -> None:
        """End the copies and give memory and file back. Twice is once."""
        self._queues.close()
        self._memory.clear()
        self._staging, self._ring, self._own_slots = [], [], {}

    @property
    def num_entries(self) -> int:
        """Keys saved and not yet taken, or taken and not yet released."""
        return len(self._blocks) + len(self._in_use)

    def _send(self, block: _Block, tensors: dict[str, Tensor]) -> None:
        """Enqueue the way out."""
        place = block.place
        host = self._staging_slot() if self._staging else self._own_slot(place)
        produced = self._queues.produced(list(tensors.values()))
        copied = self._queues.copy_out(
            host.region,
            [(block.pieces[name].offset_bytes, tensor) for name, tensor in tensors.items()],
            after=[(Ordering.PRODUCED_BEFORE_OUT, produced), *host.before_filling()],
        )
        host.fill(copied)
        block.stored = copied
        if self._staging:
            host.begin_reading()
            block.stored = self._queues.write(
                place.offset_bytes,
                host.region,
                place.size_bytes,
                after=[(Ordering.FILLED_BEFORE_READ, copied)],
            )
            host.end_reading(Ordering.WRITTEN_BEFORE_SLOT_REUSE, block.stored)
        else:
            block.host = host
        self._copied.append(copied)
        self._let_go(self._source_lag)

    def _let_go(self, still_held: int) -> None:
        """Give compute the memory of all tensors copied out but those of the last parcels."""
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
            if block.pieces:
                slot = self._ring[self._brought_back % len(self._ring)]
                if not slot.can_be_filled:
                    break
                self._send_back(block, slot)
                self._brought_back += 1
            self._next_back += 1

    def _send_back(self, block: _Block, ring: Slot) -> None:
        """Enqueue the way back into ``ring``."""
        assert block.stored is not None, "a parcel is stored before it comes back"
        place, host = block.place, block.host
        ready = (Ordering.FILLED_BEFORE_READ, block.stored)
        if host is None:
            host = self._staging_slot()
            read = self._queues.read(
                host.region,
                place.offset_bytes,
                place.size_bytes,
                after=[ready, *host.before_filling()],
            )
            host.fill(read)
            ready = (Ordering.READ_BEFORE_BACK, read)
        host.begin_reading()
        block.back = self._queues.copy_back(
            ring.region, host.region, place.size_bytes, after=[ready, *ring.before_filling()]
        )
        host.end_reading(Ordering.BACK_BEFORE_SLOT_REWRITE, block.back)
        ring.fill(block.back)
        block.ring = ring

    def _staging_slot(self) -> Slot:
        """The staging slot whose last use began longest ago."""
        slot = self._staging[self._staged % len(self._staging)]
        self._staged += 1
        return slot

    def _own_slot(self, place: Extent) -> Slot:
        """A parcel's slot in a host tier."""
        slot = self._own_slots.get(place.offset_bytes)
        if slot is None or slot.region.data.numel() != place.size_bytes:
            end = place.offset_bytes + place.size_bytes
            data = self._memory["host"][place.offset_bytes : end]
            slot = Slot(Region("host", place.offset_bytes, data))
            self._own_slots[place.offset_bytes] = slot
        return slot

    def _make_room(self, schedule: OffloadSchedule) -> None:
        """Take memory and file space where what there is does not do; slots begin anew."""
        self._queues.abort()  # nothing uses what is given back
        self._offloads = _NOWHERE  # should there be no room, the next step makes it anew
        on_disk = self._tier.kind == "disk"
        slot_bytes = max(self._slot_bytes, schedule.largest_bytes)
        host_bytes = schedule.staging_slots * slot_bytes if on_disk else schedule.tier_bytes
        if on_disk and schedule.tier_bytes > self._file_bytes:
            assert self._tier.directory is not None, "checked by the tier"
            self._file_bytes = 0
            self._queues.open_file(self._tier.directory, schedule.tier_bytes)
            self._file_bytes = schedule.tier_bytes
        self._staging, self._ring, self._own_slots = [], [], {}
        self._room_for("host", host_bytes, take=self._queues.host_memory)
        self._room_for("ring", schedule.ring_slots * slot_bytes, take=self._queues.device_memory)
        self._slot_bytes = slot_bytes
        if on_disk:
            self._staging = self._slots("host", schedule.staging_slots)
        self._ring = self._slots("ring", schedule.ring_slots)

    def _room_for(self, place: str, size_bytes: int, *, take: Callable[[int], Tensor]) -> None:
        if place in self._memory and self._memory[place].numel() >= size_bytes:
            return
        self._memory.pop(place, None)  # first: both at once may be too much
        self._memory[place] = take(size_bytes)

    def _slots(self, place: str, count: int) -> list[Slot]:
        data, size = self._memory[place], self._slot_bytes
        return [Slot(Region(place, i, data[i * size : (i + 1) * size])) for i in range(count)]

    def _free_slots(self) -> None:
        """All are free, whatever was in them: the copies that used them have ended."""
        self._staging = [Slot(slot.region) for slot in self._staging]
        self._ring = [Slot(slot.region) for slot in self._ring]
        self._own_slots = {}

    def _begin(self) -> None:
        """As before the first save of a step."""
        self._blocks: dict[ActivationKey, _Block] = {}
        self._in_use: dict[ActivationKey, Slot] = {}
        self._occupied: dict[int, ActivationKey] = {}
        self._copied: deque[Event] = deque()
        self._next_take = self._next_back = self._brought_back = 0

    def _count(self, counts: Counter[str], pieces: Mapping[str, _TensorSlice]) -> None:
        for name, piece in pieces.items():
            counts[class_of(name)] += prod(piece.shape) * piece.dtype.itemsize

    def _take_counts(self) -> tuple[dict[str, int], dict[str, int]]:
        counts = dict(self._out_bytes), dict(self._back_bytes)
        self._out_bytes.clear()
        self._back_bytes.clear()
        return counts


def _view(data: Tensor, piece: _TensorSlice) -> Tensor:
    """A piece of a parcel as the tensor it is."""
    size = prod(piece.shape) * piece.dtype.itemsize
    flat = data[piece.offset_bytes : piece.offset_bytes + size]
    return flat.view(piece.dtype).view(piece.shape)
