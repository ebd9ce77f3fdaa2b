"""Lane of a CPU: host memory and the disk, with a pool of threads for the disk.

Compute runs in the calling thread: issued compute is done, and compute waits for a copy by
blocking. Device memory is host memory, so what leaves is copied to its slot at once, and the disk
is read straight into the ring. Slots and ring are host arenas, resident from the start and counted
by the planner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sppo.offload.arena import HostArena
from sppo.offload.copy_report import CopyReport
from sppo.offload.lane import Copy, Lane
from sppo.offload.worker_pool import Event, WorkerPool, wait_for


class CpuLane(Lane):
    """:class:`sppo.offload.lane.Lane` of a CPU."""

    reads_to_device = True

    def __init__(self) -> None:
        super().__init__()
        self._exposed_s = 0.0

    def host_memory(self, name: str, size_bytes: int) -> Tensor:
        """Map host memory, which is returned to the system with its last view."""
        return HostArena(size_bytes).tensor(0, (size_bytes,), torch.uint8)

    def device_memory(self, size_bytes: int) -> Tensor:
        """Map host memory, which on a CPU is device memory."""
        return self.host_memory("device", size_bytes)

    def computed(self, tensors: Sequence[Tensor]) -> Event:
        """Return a reached event: this thread has done all compute."""
        return _now()

    def out(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Copy now, while compute waits: a thread would take the same cores."""
        begin_s = time.perf_counter()
        for event in after:
            wait_for(event)
        for target, source in copies:
            np.copyto(as_bytes(target), as_bytes(source))
        self._exposed_s += time.perf_counter() - begin_s
        return _now()

    def back(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Copy now, while compute waits."""
        return self.out(copies, after=after)

    def before_compute(self, event: Event) -> None:
        """Wait for ``event`` and count the time as exposed."""
        begin_s = time.perf_counter()
        try:
            wait_for(event)
        finally:
            self._exposed_s += time.perf_counter() - begin_s

    def drain(self) -> bool:
        """Skip transfers that have not started, wait for the others, drop errors and times."""
        self.take_times()
        return self._drain_disk()

    def take_times(self) -> CopyReport:
        """Return the times since the last call."""
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        out_s, back_s = self._take_disk_s()
        return CopyReport(exposed_s=exposed_s, out_s=out_s, back_s=back_s)

    def close(self) -> None:
        """End the threads and close the file; repeated calls do nothing."""
        self._end_threads()
        self._close_file()


class MappedFileLane(CpuLane):
    """:class:`sppo.offload.lane.Lane` of a CPU to and from a file that is mapped into memory.

    Pages of the file are read from the disk and written to it as they are touched, so threads copy
    while compute goes on.

    Args:
        drop_pages: Called after each copied tensor, to drop its pages from memory.
    """

    def __init__(self, drop_pages: Callable[[], None]) -> None:
        super().__init__()
        self._pool = self._threads = WorkerPool("sppo state")
        self._drop_pages = drop_pages

    def host_memory(self, name: str, size_bytes: int) -> Tensor:
        """Allocate memory of the device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def out(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Start to copy in a thread."""
        return self._threads.submit(partial(self._copy, copies), after=after)

    def _copy(self, copies: Sequence[Copy]) -> None:
        for target, source in copies:
            np.copyto(as_bytes(target), as_bytes(source))
            self._drop_pages()


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    assert tensor.is_contiguous(), "a tensor is moved in one piece"
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _now() -> Future[None]:
    """Return a reached event."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
