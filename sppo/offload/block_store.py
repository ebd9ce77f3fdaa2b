"""Store of the tensors that layers save: some rows stay on the device, the others leave it.

The rows that leave of one layer of one unit are packed into one block; K and V, if they are
offloaded too, have blocks of their own. The extents of the blocks in the tier, and the order in
which backward uses them, are planned before the step (:mod:`sppo.activations.activation_layout`);
the store only starts the copies (:mod:`sppo.offload.tiers`). A host tier has a place for each
block. To a disk, blocks pass through a few staging slots in host memory, and back through these or,
if device memory is host memory, straight into the ring: the slots on the device in which blocks
return.

The next :data:`PREFETCH_LAYERS` keys of the order return ahead of their use, as soon as they are
permitted and the ring has room. Keys that offload nothing have empty blocks in the order, and
nothing to bring back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from sppo.activations.activation_layout import (
    MAX_BLOCKS_IN_FLIGHT_OUT,
    ActivationKey,
    OffloadSchedule,
)
from sppo.activations.block_layout import PREFETCH_LAYERS
from sppo.offload.copy_report import CopyReport
from sppo.offload.integrity import Checksums
from sppo.offload.lane import Lane
from sppo.offload.retained import RetainedTensors, copied, on_its_own
from sppo.offload.tiers import Block, Slot, Slots, Tier, pack
from sppo.offload.worker_pool import Event


@dataclass(slots=True)
class _Step:
    """Blocks of one step, and how far the step has come in the order of their use."""

    schedule: OffloadSchedule
    away: dict[ActivationKey, Block] = field(default_factory=dict)
    """Blocks that were put and not yet got."""
    occupants: dict[int, ActivationKey] = field(default_factory=dict)
    """Keys of these blocks, by their offset in the tier."""
    permitted: set[ActivationKey] = field(default_factory=set)
    num_used: int = 0
    """Number of keys that compute has got, the first ones of the order."""
    num_fetched: int = 0
    """Number of keys whose return has begun, the first ones of the order."""
    blocks_per_layer: int = 1
    """1, or 2 if K and V are saved as a block of their own, before the block of their layer."""

    def __post_init__(self) -> None:
        self.blocks_per_layer += any(key.is_kv for key in self.schedule.extents)


class BlockStore:
    """Store of the saved tensors of one rank; every key is put once and got once.

    Threads of the lane end only with :meth:`close`.

    Where compute waits, comments name the orderings that :mod:`sppo.offload.tiers` lists.

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
        self.offloads = lane is not None
        """True if tensors can leave the device."""
        self.retained = RetainedTensors()
        """Tensors that stay on the device; replaced before the first step to keep a stack."""
        self._lane = lane or Lane()
        self._tier = Tier(self._lane, disk)
        self._ring = Slots()
        self._source_lag = source_lag
        self._checksums = Checksums() if debug else None
        self._out_bytes: Counter[str] = Counter()
        self._back_bytes: Counter[str] = Counter()
        self._in_use: dict[ActivationKey, Slot] = {}
        self._sources: deque[tuple[Event, list[Tensor]]] = deque()
        self._step = _Step(OffloadSchedule({}, (), staging_slots=0, ring_slots=0))

    def reserve_host(self, schedule: OffloadSchedule) -> None:
        """Take the host memory of a step, which page-locking makes slow, before the first step.

        Raises:
            MemoryError: The host lacks memory.
        """
        if schedule.largest_bytes > 0:
            self._tier.reserve_host(schedule)

    def prepare(self, schedule: OffloadSchedule) -> None:
        """Reserve memory and disk space for a step; call between steps.

        Raises:
            MemoryError: The host or the device lacks memory.
            OSError: The disk lacks space.
            RuntimeError: The device has not finished the copies of an earlier step.
        """
        assert not self._step.away, "extents of blocks that are away stay as they are"
        assert not self._in_use, "slots of blocks that are in use stay as they are"
        if self._checksums is not None:
            self._checksums.begin_step()
        if schedule is not self._step.schedule and schedule.largest_bytes > 0:
            self._lane.settle()
            self._tier.reserve(schedule)
            slots, slot_bytes = schedule.ring_slots, schedule.largest_bytes
            self._ring.reserve(slots, slot_bytes, self._lane.device_memory)
        self._step = _Step(schedule)

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
            offloaded: Tensors that leave the device, whose copies are started; empty or None if the
                plan has nothing of the key leave.

        Raises:
            OSError: The disk failed in an earlier copy.
        """
        if retained is not None:
            self.retained.put(key, retained)
        if key in self._step.schedule.extents:
            self._put_away(key, offloaded or {})
        else:
            assert not offloaded, f"{key} has no place outside the device"

    def permit(self, keys: Iterable[ActivationKey]) -> None:
        """Permit the blocks of ``keys`` to return from now on, as ring slots become free."""
        self._step.permitted.update(keys)
        self._bring_back()

    @property
    def next_kv(self) -> ActivationKey | None:
        """Key to get next, if it is of K and V that may return; else None."""
        step, order = self._step, self._step.schedule.order
        key = order[step.num_used] if step.num_used < len(order) else None
        return key if key in step.permitted and key.is_kv else None

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
        is_retained, is_away = key in self.retained.keys, key in self._step.away
        assert is_retained or is_away, f"{key} is not saved"
        offloaded = self._get_back(key) if is_away else {}
        retained = self.retained.get(key, owned=owned) if is_retained else {}
        return copied(offloaded) if owned else offloaded, retained

    def free(self, key: ActivationKey) -> None:
        """Allow reuse of the memory of ``key``, after all compute that reads it was issued."""
        self.retained.free(key)
        if key in self._in_use:
            slot = self._in_use.pop(key)
            if self._checksums is not None:
                self._checksums.overwrite(slot.data)
            slot.empty(self._lane.computed([slot.data]))  # ordering 5
            self._bring_back()

    def take_report(self) -> CopyReport:
        """Return bytes and times of the copies since the last call, and the reserved memory."""
        report = replace(
            self._lane.take_times(),
            out_bytes=dict(self._out_bytes),
            back_bytes=dict(self._back_bytes),
            host_bytes=self._tier.host.data.numel(),
            device_bytes=self._ring.data.numel(),
            disk_bytes=self._tier.disk_bytes,
        )
        self._out_bytes.clear()
        self._back_bytes.clear()
        return report

    def close(self) -> bool:
        """End all copies, drop all entries, and free memory and file; repeated calls do nothing.

        Returns:
            Whether all copies have ended; if not, they may still use their memory, which is kept.
        """
        if not self._lane.close():
            return False
        self.retained.close()
        self._in_use.clear()
        self._sources.clear()
        self._step.away.clear()
        self._tier.close()
        self._ring.release()
        return True

    @property
    def num_entries(self) -> int:
        """Number of keys put and not yet got, or whose slots are not yet freed."""
        return len(self.retained.keys | self._step.away.keys()) + len(self._in_use)

    def _put_away(self, key: ActivationKey, tensors: dict[str, Tensor]) -> None:
        """Start to copy ``tensors`` out; the dictionary may be empty."""
        step = self._step
        assert key not in step.away, f"{key} is saved already"
        # On a GPU, sources live until they are copied, and a view would keep its whole base alive.
        tensors = {
            name: on_its_own(tensor.contiguous()) if tensor.is_cuda else tensor.contiguous()
            for name, tensor in tensors.items()
        }
        block = step.away[key] = pack(key, step.schedule.extents[key], tensors)
        if not tensors:
            return
        occupant = step.occupants.setdefault(block.extent.offset_bytes, key)
        assert occupant == key, f"{key} is saved where {occupant} still lies"
        self._out_bytes.update(block.bytes_by_class)
        if self._checksums is not None:
            self._checksums.note(key, tensors)
        self._sources.append((self._tier.send(block, tensors), [*tensors.values()]))
        self._let_go(self._source_lag * step.blocks_per_layer)

    def _let_go(self, still_held: int) -> None:
        """Let compute reuse the sources of all copies out except the last ``still_held``."""
        while len(self._sources) > still_held:
            sent, _ = self._sources[0]
            self._lane.before_compute(sent)  # ordering 2
            self._sources.popleft()

    def _get_back(self, key: ActivationKey) -> dict[str, Tensor]:
        """Return the tensors of ``key``, the block to use next, as views of the ring."""
        step, order = self._step, self._step.schedule.order
        assert key == order[step.num_used], f"{key} is taken before {order[step.num_used]}"
        step.num_used += 1
        self._bring_back()
        if step.num_used == len(order):
            self._let_go(0)
        block = step.away.pop(key)
        if not block.tensors:
            return {}
        assert step.num_fetched >= step.num_used, f"{key} has no ring slot: too many are in use"
        del step.occupants[block.extent.offset_bytes]
        self._bring_back(wanted=block)
        self._lane.before_compute(block.back)  # ordering 4
        self._in_use[key] = block.ring
        self._back_bytes.update(block.bytes_by_class)
        tensors = block.views(block.ring.data)
        if self._checksums is not None:
            self._checksums.check(key, tensors)
        return tensors

    def _bring_back(self, *, wanted: Block | None = None) -> None:
        """Enqueue the copies back of ``wanted`` and the next blocks, as far as there is room."""
        self._tier.advance(wanted)
        step = self._step
        for key in step.schedule.order[step.num_fetched : step.num_used + PREFETCH_LAYERS]:
            block = step.away.get(key)
            if block is None:
                return  # not saved yet: belongs to a later sequence
            if block.tensors:
                if key not in step.permitted or self._ring.is_full or self._tier.host.is_full:
                    return
                block.ring = self._ring.take()
                self._tier.fetch(block)
            step.num_fetched += 1
