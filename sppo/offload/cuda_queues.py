"""Copy queues of a CUDA device: two copy streams, events, and page-locked host memory.

Compute is whatever stream is current when a verb is called; it is asked for every time, never kept.
No tensor is handed to the allocator while a copy may still read it: its reference is held until
compute has been told to wait for the copy, so ``record_stream`` is not needed, and what is freed
when does not depend on how far the host has run ahead.

With a host tier everything is enqueued by the calling thread and no host thread ever waits. In
front of a disk, a copy out waits for a write, and a copy back for a read, which only host threads
can do; then both streams are fed by a thread each, in the same order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sppo.offload.arena import HostArena
from sppo.offload.copy_report import CopyReport
from sppo.offload.file_tier import FileTier
from sppo.offload.queues import Dependency, Event, Region
from sppo.offload.thread_queues import POISON
from sppo.offload.worker_queue import HostEvent, Lane, Operation, close_lanes
from sppo.units import MIB

_cuda: Any = torch.cuda  # parts of it have no types

PIECE_BYTES = 32 * MIB
"""Longer copies are cut: a copy engine is first come, first served, and others use it too."""


class StreamEvent:
    """A point in a stream; a feeding thread may reach it later than it was asked for."""

    def __init__(self, event: torch.cuda.Event, *, issued: Operation | None = None) -> None:
        self.event, self._issued = event, issued

    @property
    def done(self) -> bool:
        """Whether the device has come this far."""
        return (self._issued is None or self._issued.done) and bool(_cuda.Event.query(self.event))

    def wait(self) -> None:
        """Block this thread until the device has come this far.

        Raises:
            OSError: the disk failed on the way.
        """
        self.wait_until_issued()
        self.event.synchronize()

    def wait_until_issued(self) -> None:
        """Block this thread until the event stands in its stream.

        Raises:
            OSError: the disk failed on the way.
        """
        if self._issued is not None:
            self._issued.wait()


class CudaQueues:
    """:class:`sppo.offload.queues.CopyQueues` of one CUDA device.

    Args:
        device: whose memory tensors leave and come back to.
        poison: overwrite every slot once it is read, so that what reads it again reads NaN.
        delay_cycles: clock cycles that every copy waits before it begins, to test orderings.
    """

    def __init__(
        self, device: torch.device, *, poison: bool = False, delay_cycles: int = 0
    ) -> None:
        self._device, self._poison, self._delay_cycles = device, poison, delay_cycles
        self._streams = {name: _cuda.Stream(device) for name in ("out", "back")}
        self._sources: deque[tuple[Event, Sequence[tuple[int, Tensor]]]] = deque()
        self._lanes: dict[str, Lane] = {}
        self._file: FileTier | None = None
        self._timings: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._host_wait_s = 0.0
        self._poisonous: Tensor | None = None
        self._locked: Tensor | None = None
        self.register_s = 0.0
        """What page-locking the host memory took."""
        self._closed = False

    def host_memory(self, size_bytes: int) -> Tensor:
        """See :class:`sppo.offload.queues.CopyQueues`; page-locked in one piece.

        Raises:
            MemoryError: the machine, or its limit on locked memory (``ulimit -l``), has not that
                much.
        """
        self._unlock()
        with HostArena(size_bytes) as arena:
            memory = arena.tensor(0, (size_bytes,), torch.uint8)
        begin_s = time.perf_counter()
        failure = _cuda.cudart().cudaHostRegister(memory.data_ptr(), size_bytes, 0)
        if int(failure) != 0:
            raise MemoryError(
                f"CUDA refuses to page-lock {size_bytes} bytes of host memory ({failure}); raise "
                "ulimit -l, or offload less (activations.offload_ratio)"
            )
        self.register_s = time.perf_counter() - begin_s
        self._locked = memory  # held here, so that no page goes back to the system while locked
        return memory

    def device_memory(self, size_bytes: int) -> Tensor:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        if self._poison:
            self._poisonous = torch.full(
                (size_bytes,), POISON, dtype=torch.uint8, device=self._device
            )
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._file = FileTier(directory, size_bytes)
        if not self._lanes:
            names = ("out", "write", "read", "back")
            self._lanes = {name: Lane(f"sppo {name}") for name in names}

    def produced(self, sources: Sequence[Tensor]) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        return self._mark_compute()

    def copy_out(
        self, host: Region, pieces: Sequence[tuple[int, Tensor]], *, after: Sequence[Dependency]
    ) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""

        def copy() -> None:
            for offset, source in pieces:
                data = source.view(-1).view(torch.uint8)
                _copy(host.data[offset : offset + data.numel()], data)

        copied = self._enqueue("out", copy, after)
        self._sources.append((copied, pieces))
        return copied

    def reusable(self, copied: Event) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        self._compute_waits(copied)
        event, _ = self._sources.popleft()
        assert event is copied, "tensors are let go in the order in which they were copied"

    def write(
        self, offset_bytes: int, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        data = host.data.numpy()[:size_bytes]

        def write() -> None:
            assert self._file is not None, "open_file() comes before writing"
            self._file.write(offset_bytes, data).wait()
            if self._poison:
                data.fill(POISON)

        return self._lanes["write"].add(write, after=_on_host(after))

    def read(
        self, host: Region, offset_bytes: int, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        data = host.data.numpy()[:size_bytes]

        def read() -> None:
            assert self._file is not None, "open_file() comes before reading"
            self._file.read(offset_bytes, data).wait()

        return self._lanes["read"].add(read, after=_on_host(after))

    def copy_back(
        self, ring: Region, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""

        def copy() -> None:
            _copy(ring.data[:size_bytes], host.data[:size_bytes])
            if self._poisonous is not None:
                _copy(host.data[:size_bytes], self._poisonous[:size_bytes])

        return self._enqueue("back", copy, after)

    def use(self, ring: Region, back: Event) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        self._compute_waits(back)

    def used(self, ring: Region) -> Event:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        if self._poison:
            ring.data.fill_(POISON)
        return self._mark_compute()

    def check(self) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        for lane in self._lanes.values():
            lane.check()

    def abort(self) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        for lane in self._lanes.values():
            lane.cancel()
        for lane in self._lanes.values():
            lane.wait_all()
        _cuda.synchronize(self._device)
        self._sources.clear()

    def take_times(self) -> CopyReport:
        """See :class:`sppo.offload.queues.CopyQueues`; waits for the device, at a step's end."""
        _cuda.synchronize(self._device)
        seconds = {
            name: sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
            for name, pairs in self._timings.items()
        }
        self._timings = {}
        disk = {name: lane.take_busy_s() for name, lane in self._lanes.items()}
        exposed_s = seconds.get("compute", 0.0) + self._host_wait_s
        self._host_wait_s = 0.0
        return CopyReport(
            exposed_s=exposed_s,
            out_s=max(seconds.get("out", 0.0), disk.get("write", 0.0)),
            back_s=max(seconds.get("back", 0.0), disk.get("read", 0.0)),
        )

    def close(self) -> None:
        """See :class:`sppo.offload.queues.CopyQueues`."""
        if self._closed:
            return
        self._closed = True
        close_lanes(self._lanes.values())
        _cuda.synchronize(self._device)
        self._sources.clear()
        if self._file is not None:
            self._file.close()
        self._unlock()

    def _unlock(self) -> None:
        """Give up the host memory there is; no copy uses it any more."""
        if self._locked is not None:
            _cuda.cudart().cudaHostUnregister(self._locked.data_ptr())
            self._locked = None

    def _mark_compute(self) -> StreamEvent:
        event = _cuda.Event()
        event.record(_cuda.current_stream(self._device))
        return StreamEvent(event)

    def _compute_waits(self, copied: Event) -> None:
        """Make compute wait; what it waits, and what the host does, is exposed."""
        assert isinstance(copied, StreamEvent), "copies between host and device are in streams"
        start = time.perf_counter()
        copied.wait_until_issued()
        self._host_wait_s += time.perf_counter() - start
        stream = _cuda.current_stream(self._device)
        begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        stream.wait_event(copied.event)
        end.record(stream)
        self._timings.setdefault("compute", []).append((begin, end))

    def _enqueue(
        self, name: str, copy: Callable[[], None], after: Sequence[Dependency]
    ) -> StreamEvent:
        """Put ``copy`` into a stream, at once or by the thread that feeds it."""
        begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
        in_streams = [event for _, event in after if isinstance(event, StreamEvent)]
        on_host = [event for _, event in after if isinstance(event, Operation)]

        def issue() -> None:
            stream = self._streams[name]
            for event in in_streams:
                event.wait_until_issued()
                stream.wait_event(event.event)
            with torch.no_grad(), _cuda.stream(stream):
                if self._delay_cycles:
                    _cuda._sleep(self._delay_cycles)
                begin.record(stream)
                copy()
                end.record(stream)

        self._timings.setdefault(name, []).append((begin, end))
        if self._file is None:
            assert not on_host, "only a disk makes a copy wait for a host thread"
            issue()
            return StreamEvent(end)
        return StreamEvent(end, issued=self._lanes[name].add(issue, after=on_host))


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy bytes between host and device, piece by piece, in the current stream."""
    for start in range(0, source.numel(), PIECE_BYTES):
        stop = min(start + PIECE_BYTES, source.numel())
        target[start:stop].copy_(source[start:stop], non_blocking=True)


def _on_host(after: Sequence[Dependency]) -> list[HostEvent]:
    found: list[HostEvent] = []
    for _, event in after:
        assert isinstance(event, StreamEvent | Operation), f"{event} is not of these queues"
        found.append(event)
    return found
