"""Copy queues of a CUDA device: two copy streams, events, and page-locked host memory.

Compute runs in the stream that is current when a method is called. A tensor that is copied out is
referenced until compute has been made to wait for the copy, so that the allocator cannot reuse its
memory too early. ``record_stream`` is therefore not needed, and the time at which memory is freed
does not depend on how far the host has run ahead.

With a host tier, the calling thread enqueues all copies, and no host thread ever waits. With a
disk, a copy out may wait for a write and a copy back for a read, which only host threads can do.
Each of the two streams is then fed by a thread of its own, in the same order. These threads select
the rank's device when they start, and sleep instead of spinning while they wait for the device.

After a failure, no method waits longer for the device than :class:`CopyStreams` allows. Memory that
an unresponsive device may still use is kept until the process ends.
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

from sppo.offload.copy_report import CopyReport
from sppo.offload.disk.file_tier import FileTier
from sppo.offload.locked_arena import LockedArena
from sppo.offload.queues.copy_queues import Dependency, Event, Region
from sppo.offload.queues.copy_streams import CopyStreams, copy_in_pieces
from sppo.offload.queues.thread_queues import POISON
from sppo.offload.queues.worker_queue import WorkerQueue, close_queues, wait_for

_cuda: Any = torch.cuda  # parts of torch.cuda are untyped


class StreamEvent:
    """Point in a stream, which a worker thread may issue later than the call that returned it."""

    def __init__(self, event: torch.cuda.Event, *, issued: Future[None] | None = None) -> None:
        self.event, self._issued = event, issued

    def done(self) -> bool:
        """Return whether the device has reached the event."""
        issued = self._issued is None or self._issued.done()
        return issued and bool(_cuda.Event.query(self.event))

    def exception(self) -> BaseException | None:
        """Block until the device reaches the event; return the error if it was never issued."""
        error = None if self._issued is None else self._issued.exception()
        if error is None:
            self.event.synchronize()
        return error

    def wait_until_issued(self) -> None:
        """Block this thread until the event is recorded in its stream.

        Raises:
            OSError: The disk failed in a copy that the event depends on.
        """
        if self._issued is not None:
            wait_for(self._issued)


class CudaQueues:
    """:class:`sppo.offload.queues.copy_queues.CopyQueues` of one CUDA device.

    Args:
        device: CUDA device.
        streams: Copy streams of the rank, shared by all its queues; None makes two streams for
            these queues alone.
        most_host_bytes: Host memory up to which :meth:`host_memory` grows in place.
        poison: Overwrite every slot after it is read, so that reading it again gives NaN.
        delay_cycles: Clock cycles that every copy waits before it starts, to test orderings.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        streams: CopyStreams | None = None,
        most_host_bytes: int = 0,
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
        self._host = LockedArena(_cuda.cudart(), most_bytes=most_host_bytes)
        self._closed = False

    def host_memory(self, size_bytes: int) -> Tensor:
        """Return page-locked host memory, in place of that of earlier calls.

        Raises:
            MemoryError: The machine lacks memory, or the driver refuses to page-lock it.
        """
        return self._host.memory(size_bytes)

    def device_memory(self, size_bytes: int) -> Tensor:
        """Allocate device memory."""
        if self._poison:
            self._poisonous = torch.full(
                (size_bytes,), POISON, dtype=torch.uint8, device=self._device
            )
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """Reserve a file in ``directory``; from now on, threads issue the copies."""
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
        """Record an event after the compute issued so far."""
        return self._mark_compute()

    def copy_out(
        self, host: Region, placed: Sequence[tuple[int, Tensor]], *, after: Sequence[Dependency]
    ) -> Event:
        """Copy tensors to ``host`` in the stream out; keep them until :meth:`reusable`."""

        def copy() -> None:
            for offset, source in placed:
                target = host.data[offset : offset + source.nbytes]
                copy_in_pieces(target, source, host=target)

        copied = self._enqueue("out", copy, after)
        self._sources.append((copied, placed))
        return copied

    def reusable(self, copied: Event) -> None:
        """Make compute wait for the copy, and drop the references to its sources."""
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
            source = host.data[:size_bytes]
            copy_in_pieces(ring.data[:size_bytes], source, host=source)
            if self._poisonous is not None:
                copy_in_pieces(source, self._poisonous[:size_bytes], host=source)

        return self._enqueue("back", copy, after)

    def use(self, ring: Region, back: Event) -> None:
        """Make compute wait until ``ring`` is filled."""
        self._compute_waits(back)

    def used(self, ring: Region) -> Event:
        """Record an event after the compute that reads ``ring``."""
        if self._poison:
            ring.data.fill_(POISON)
        return self._mark_compute()

    def check(self) -> None:
        """Raise the error of the first failed copy, if any."""
        for worker in self._workers.values():
            worker.check()

    def abort(self) -> bool:
        """Skip copies that have not started, wait for the others, drop tensors and times.

        If the device does not finish the copies in time, their tensors are kept.
        """
        for worker in self._workers.values():
            worker.cancel()
        for worker in self._workers.values():
            if not worker.wait_all(limit_s=self._streams.host_thread_timeout_s):
                self._streams.give_up()
            worker.take_busy_s()
        done = self._streams.wait_for_device()
        if done:
            self._sources.clear()
        # Events of skipped copies were never recorded.
        self._timings, self._host_wait_s = {}, 0.0
        return done

    def take_times(self) -> CopyReport:
        """Return the times since the last call; waits for the device, so call it between steps."""
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
        """End threads and copies, and free file and memory; repeated calls do nothing.

        If the device does not finish in time, file and memory are kept until the process ends.
        """
        if self._closed:
            return
        if self._streams.host_thread_timeout_s is not None:
            self.abort()
        close_queues(self._workers.values(), waits=not self._streams.given_up)
        if self._streams.wait_for_device():
            self._sources.clear()
            if self._file is not None:
                self._file.close()
            self._host.release()
        self._closed = True  # last, so that an interrupted close can be repeated

    def _mark_compute(self) -> StreamEvent:
        event = _cuda.Event()
        event.record(_cuda.current_stream(self._device))
        return StreamEvent(event)

    def _compute_waits(self, copied: Event) -> None:
        """Make compute wait for a copy, and count the waits of compute and host as exposed."""
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
        """Issue ``copy`` in a stream, at once or, with a disk, in the stream's thread."""
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
