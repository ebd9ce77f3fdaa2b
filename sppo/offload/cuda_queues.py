"""Copy queues of a CUDA device: two copy streams, events, and page-locked host memory.

Compute is the stream that is current when a method is called; none is kept. A tensor that is copied
out is referenced until compute has been made to wait for the copy, so the allocator cannot reuse
its memory too early. ``record_stream`` is not needed, and the time at which memory is freed does
not depend on how far the host has run ahead.

With a host tier the calling thread enqueues everything, and no host thread ever waits. Before a
disk, a copy out waits for a write and a copy back for a read, and only host threads can wait for
those. Both streams are then fed by one thread each, in the same order. These threads compute on the
rank's device from their start, and sleep instead of spinning while they wait for it.

After a failure nothing here waits longer for the device than :class:`CopyStreams` allows: what a
device that no longer answers may still use stays as it is until the process ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sppo.offload.arena import HostArena
from sppo.offload.copy_report import CopyReport
from sppo.offload.copy_streams import CopyStreams, copy_in_pieces
from sppo.offload.file_tier import FileTier
from sppo.offload.page_lock import lock_pages, unlock_pages
from sppo.offload.queues import Dependency, Event, Region
from sppo.offload.thread_queues import POISON
from sppo.offload.worker_queue import WorkerQueue, close_queues, wait_for

_cuda: Any = torch.cuda  # parts of it have no types


class StreamEvent:
    """A point in a stream, which a worker thread may issue later than it was asked for."""

    def __init__(self, event: torch.cuda.Event, *, issued: Future[None] | None = None) -> None:
        self.event, self._issued = event, issued

    def done(self) -> bool:
        """Return whether the device has reached it."""
        issued = self._issued is None or self._issued.done()
        return issued and bool(_cuda.Event.query(self.event))

    def exception(self) -> BaseException | None:
        """Block this thread until the device has reached it; return why it was never issued."""
        error = None if self._issued is None else self._issued.exception()
        if error is None:
            self.event.synchronize()
        return error

    def wait_until_issued(self) -> None:
        """Block this thread until the event stands in its stream.

        Raises:
            OSError: the disk failed on the way.
        """
        if self._issued is not None:
            wait_for(self._issued)


class CudaQueues:
    """:class:`sppo.offload.queues.CopyQueues` of one CUDA device.

    Args:
        device: a CUDA device.
        streams: of the rank, shared by all its queues; None makes two for these queues alone.
        poison: overwrite every slot once it is read, so that reading it again gives NaN.
        delay_cycles: clock cycles that every copy waits before it begins, to test orderings.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        streams: CopyStreams | None = None,
        poison: bool = False,
        delay_cycles: int = 0,
    ) -> None:
        self._device, self._poison, self._delay_cycles = device, poison, delay_cycles
        self._streams = CopyStreams(_cuda, device) if streams is None else streams
        self._sources: deque[tuple[Event, Sequence[tuple[int, Tensor]]]] = deque()
        self._workers: dict[str, WorkerQueue] = {}
        self._file: FileTier | None = None
        self._timings: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._host_wait_s = 0.0
        self._poisonous: Tensor | None = None
        self._locked: Tensor | None = None
        self.register_s = 0.0
        """Seconds that page-locking the host memory took."""
        self._closed = False

    def host_memory(self, size_bytes: int) -> Tensor:
        """Map host memory and page-lock it in one piece.

        Raises:
            MemoryError: the machine, or its limit on locked memory (``ulimit -l``), does not allow
                that much.
        """
        self._unlock()
        with HostArena(size_bytes) as arena:
            memory = arena.tensor(0, (size_bytes,), torch.uint8)
        begin_s = time.perf_counter()
        lock_pages(_cuda.cudart(), memory)
        self.register_s = time.perf_counter() - begin_s
        self._locked = memory  # held here, so that no page goes back to the system while locked
        return memory

    def device_memory(self, size_bytes: int) -> Tensor:
        """Allocate memory of the device."""
        if self._poison:
            self._poisonous = torch.full(
                (size_bytes,), POISON, dtype=torch.uint8, device=self._device
            )
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """Reserve a file in ``directory``, and from now on feed the streams by threads."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._file = FileTier(directory, size_bytes)
        if not self._workers:
            names = ("out", "write", "read", "back")
            self._workers = {name: WorkerQueue(f"sppo {name}") for name in names}
            for worker in self._workers.values():
                worker.submit(partial(_cuda.set_device, self._device))

    def produced(self, sources: Sequence[Tensor]) -> Event:
        """Record an event behind the compute issued so far."""
        return self._mark_compute()

    def copy_out(
        self, host: Region, placed: Sequence[tuple[int, Tensor]], *, after: Sequence[Dependency]
    ) -> Event:
        """Copy tensors to their offsets in ``host`` in the stream out, and keep them until then."""

        def copy() -> None:
            for offset, source in placed:
                copy_in_pieces(host.data[offset : offset + source.nbytes], source)

        copied = self._enqueue("out", copy, after)
        self._sources.append((copied, placed))
        return copied

    def reusable(self, copied: Event) -> None:
        """Make compute wait for the copy, and let go of the tensors."""
        self._compute_waits(copied)
        event, _ = self._sources.popleft()
        assert event is copied, "tensors are let go in the order in which they were copied"

    def write(
        self, offset_bytes: int, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Enqueue a write to the file."""
        data = host.data.numpy()[:size_bytes]

        def write() -> None:
            assert self._file is not None, "open_file() comes before writing"
            self._file.write(offset_bytes, data).wait()
            if self._poison:
                data.fill(POISON)

        return self._workers["write"].submit(write, after=_on_host(after))

    def read(
        self, host: Region, offset_bytes: int, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Enqueue a read from the file."""
        data = host.data.numpy()[:size_bytes]

        def read() -> None:
            assert self._file is not None, "open_file() comes before reading"
            self._file.read(offset_bytes, data).wait()

        return self._workers["read"].submit(read, after=_on_host(after))

    def copy_back(
        self, ring: Region, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Copy from ``host`` to ``ring`` in the stream back."""

        def copy() -> None:
            copy_in_pieces(ring.data[:size_bytes], host.data[:size_bytes])
            if self._poisonous is not None:
                copy_in_pieces(host.data[:size_bytes], self._poisonous[:size_bytes])

        return self._enqueue("back", copy, after)

    def use(self, ring: Region, back: Event) -> None:
        """Make compute wait until ``ring`` is filled."""
        self._compute_waits(back)

    def used(self, ring: Region) -> Event:
        """Record an event behind the compute that reads ``ring``."""
        if self._poison:
            ring.data.fill_(POISON)
        return self._mark_compute()

    def check(self) -> None:
        """Raise the error of the first copy that failed, if one did."""
        for worker in self._workers.values():
            worker.check()

    def abort(self) -> None:
        """Leave out copies that have not begun, wait for the others, forget all of the step.

        Where the device does not end them in time, what they use is kept.
        """
        for worker in self._workers.values():
            worker.cancel()
        for worker in self._workers.values():
            if not worker.wait_all(limit_s=self._streams.give_up_s):
                self._streams.give_up()
            worker.take_busy_s()
        if self._streams.wait_for_device():
            self._sources.clear()
        # Events of copies that were left out have no time.
        self._timings, self._host_wait_s = {}, 0.0

    def take_times(self) -> CopyReport:
        """Return the times since the last call; waits for the device, at a step's end."""
        _cuda.synchronize(self._device)
        seconds = {
            name: sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
            for name, pairs in self._timings.items()
        }
        self._timings = {}
        disk = {name: worker.take_busy_s() for name, worker in self._workers.items()}
        exposed_s = seconds.get("compute", 0.0) + self._host_wait_s
        self._host_wait_s = 0.0
        return CopyReport(
            exposed_s=exposed_s,
            out_s=max(seconds.get("out", 0.0), disk.get("write", 0.0)),
            back_s=max(seconds.get("back", 0.0), disk.get("read", 0.0)),
        )

    def close(self) -> None:
        """End threads and copies and release file and memory; closing again does nothing.

        Where the device does not end them in time, all of it is left to the end of the process.
        """
        if self._closed:
            return
        if self._streams.give_up_s is not None:
            self.abort()
        close_queues(self._workers.values(), waits=not self._streams.given_up)
        if self._streams.wait_for_device():
            self._sources.clear()
            if self._file is not None:
                self._file.close()
            self._unlock()
        self._closed = True  # only now: what was interrupted can be closed again

    def _unlock(self) -> None:
        """Unlock and release the host memory, which no copy uses any more."""
        if self._locked is not None:
            unlock_pages(_cuda.cudart(), self._locked)
            self._locked = None

    def _mark_compute(self) -> StreamEvent:
        event = _cuda.Event()
        event.record(_cuda.current_stream(self._device))
        return StreamEvent(event)

    def _compute_waits(self, copied: Event) -> None:
        """Make compute wait for a copy; the waits of compute and of the host are exposed."""
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
        """Issue ``copy`` in a stream, at once or by the thread that feeds the stream."""
        by_threads = self._file is not None
        begin, end = (_cuda.Event(enable_timing=True, blocking=by_threads) for _ in range(2))
        in_streams = [event for _, event in after if isinstance(event, StreamEvent)]
        on_host = [event for _, event in after if isinstance(event, Future)]

        def issue() -> None:
            stream = self._streams.out if name == "out" else self._streams.back
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
        if not by_threads:
            assert not on_host, "only a disk makes a copy wait for a host thread"
            issue()
            return StreamEvent(end)
        return StreamEvent(end, issued=self._workers[name].submit(issue, after=on_host))


def _on_host(after: Sequence[Dependency]) -> list[Event]:
    events = [event for _, event in after]
    for event in events:
        assert isinstance(event, StreamEvent | Future), f"{event} is not of these queues"
    return events
