"""Slots that blocks pass through (free, filling, full, reading), and the memory of the slots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from torch import Tensor

from sppo.activations.activation_layout import Extent, OffloadSchedule
from sppo.offload.queues.copy_queues import CopyQueues, Dependency, Event, Ordering, Region


class Slot:
    """Region of memory with the events at the end of its filling and of its reading.

    Copies are enqueued long before they run. The next filling may be enqueued as soon as the end of
    the reading has an event, which the filling then waits for.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self._filled: Event | None = None
        self._is_read = False
        self._emptied: Dependency | None = None

    @property
    def state(self) -> Literal["free", "filling", "full", "reading"]:
        """State of the slot now, according to the events that have been reached."""
        if self._filled is None:
            emptied = self._emptied is None or self._emptied[1].done()
            return "free" if emptied else "reading"
        if self._is_read:
            return "reading"
        return "full" if self._filled.done() else "filling"

    @property
    def can_be_filled(self) -> bool:
        """True if the next filling may be enqueued: the slot has no unread contents."""
        return self._filled is None

    def before_filling(self) -> tuple[Dependency, ...]:
        """Return the event that the next filling must wait for; empty if there is none."""
        assert self.can_be_filled, f"{self} holds what nobody has read yet"
        return () if self._emptied is None else (self._emptied,)

    def fill(self, filled: Event) -> None:
        """Record a filling that ends with the event ``filled``."""
        assert self.can_be_filled, f"{self} holds what nobody has read yet"
        self._filled, self._is_read, self._emptied = filled, False, None

    def begin_reading(self) -> None:
        """Record that a read of the slot was, or is about to be, enqueued."""
        assert self._filled is not None, f"{self} is read, and nothing is in it"
        self._is_read = True

    def end_reading(self, ordering: Ordering, read: Event) -> None:
        """Record that the reading ends with the event ``read``, for which a filling waits."""
        assert self._is_read, f"{self} is given back, and nobody reads it"
        self._filled, self._is_read, self._emptied = None, False, (ordering, read)

    def __str__(self) -> str:
        return f"slot {self.region.place} {self.region.index} ({self.state})"


class SlotMemory:
    """Memory and file space of one store, reserved before a step and reused, and its slots.

    Args:
        queues: Copy queues, which allocate the memory and open the file.
        disk: Directory of the file for blocks; None if they stay in host memory.
    """

    def __init__(self, queues: CopyQueues, disk: Path | None) -> None:
        self._queues, self._disk = queues, disk
        self._memory: dict[str, Tensor] = {}
        self._slot_bytes = 0
        self._staging: list[Slot] = []
        self._staged = 0
        self._of_extent: dict[int, Slot] = {}
        self.ring: list[Slot] = []
        """Slots on the device into which blocks return."""
        self.file_bytes = 0
        """Size of the file on a disk."""

    @property
    def on_disk(self) -> bool:
        """True if blocks are written from host memory to a file."""
        return self._disk is not None

    @property
    def host_bytes(self) -> int:
        """Size of the host memory."""
        return self._memory["host"].numel() if "host" in self._memory else 0

    @property
    def ring_bytes(self) -> int:
        """Size of the ring."""
        return self._memory["ring"].numel() if "ring" in self._memory else 0

    def make_room(self, schedule: OffloadSchedule) -> None:
        """Free all slots, and replace memory and file if they are too small for ``schedule``.

        Raises:
            MemoryError: The host or the device lacks memory.
            OSError: The disk lacks space.
            RuntimeError: The device has not finished earlier copies, which may use the memory.
        """
        if not self._queues.abort():
            raise RuntimeError(
                "the device does not answer, and may still copy to and from the memory of "
                "offloaded tensors: the step cannot start"
            )
        slot_bytes = max(self._slot_bytes, schedule.largest_bytes)
        if self._disk is not None and schedule.tier_bytes > self.file_bytes:
            self.file_bytes = 0
            self._queues.open_file(self._disk, schedule.tier_bytes)
            self.file_bytes = schedule.tier_bytes
        self._staging, self.ring, self._of_extent = [], [], {}
        self.reserve_host(schedule)
        self._take("ring", schedule.ring_slots * slot_bytes, take=self._queues.device_memory)
        self._slot_bytes = slot_bytes
        if self.on_disk:
            self._staging = self._cut("host", schedule.staging_slots)
        self.ring = self._cut("ring", schedule.ring_slots)

    def reserve_host(self, schedule: OffloadSchedule) -> None:
        """Take the host memory of ``schedule``, unless there is enough already.

        Raises:
            MemoryError: The host lacks memory.
        """
        slot_bytes = max(self._slot_bytes, schedule.largest_bytes)
        host_bytes = schedule.staging_slots * slot_bytes if self.on_disk else schedule.tier_bytes
        self._take("host", host_bytes, take=self._queues.host_memory)

    def to_fill(self, extent: Extent) -> Slot:
        """Return a host slot for a block: with a disk, the least recently used staging slot."""
        if self.on_disk:
            slot = self._staging[self._staged % len(self._staging)]
            self._staged += 1
            return slot
        own = self._of_extent.get(extent.offset_bytes)
        if own is None or own.region.data.numel() != extent.size_bytes:
            data = self._memory["host"][extent.offset_bytes : sum(extent)]
            own = Slot(Region("host", extent.offset_bytes, data))
            self._of_extent[extent.offset_bytes] = own
        return own

    def free(self) -> None:
        """Free all slots regardless of their state; no copy may use them any more."""
        self._staging = [Slot(slot.region) for slot in self._staging]
        self.ring = [Slot(slot.region) for slot in self.ring]
        self._of_extent = {}

    def clear(self) -> None:
        """Free the memory; the queues close the file."""
        self._memory.clear()
        self._staging, self.ring, self._of_extent = [], [], {}

    def _take(self, place: str, size_bytes: int, *, take: Callable[[int], Tensor]) -> None:
        if place in self._memory and self._memory[place].numel() >= size_bytes:
            return
        self._memory.pop(place, None)  # free first: both allocations may not fit
        self._memory[place] = take(size_bytes)

    def _cut(self, place: str, count: int) -> list[Slot]:
        data, size = self._memory[place], self._slot_bytes
        return [Slot(Region(place, i, data[i * size : (i + 1) * size])) for i in range(count)]
