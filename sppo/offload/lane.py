"""Lanes: copies between a device and the tiers behind it, ordered by events.

A lane copies out of the device and back, and has a file on a disk. Every copy is given the events
that it waits for; nothing else orders copies with each other or with compute. Copies that were
enqueued earlier never wait for later ones, so copies cannot deadlock.

The lanes of this module are those of a CPU. Others are :mod:`sppo.offload.cuda_lane`, and one in
the tests that runs copies in random order and checks all accesses to memory.
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
from sppo.offload.disk.file_tier import FileTier
from sppo.offload.worker_pool import Event, WorkerPool, wait_for

Copy = tuple[Tensor, Tensor]
"""Copy as (target, source): contiguous tensors with the same shape and dtype."""
_REACHED: Future[None] = Future()
_REACHED.set_result(None)


class Lane:
    """Copies of a CPU, and a file; only the thread that issues compute may call the methods.

    Compute runs in the calling thread: issued compute is done, and compute waits for a copy by
    blocking. Device memory is host memory, so what leaves is copied to its slot at once. Slots and
    ring are host arenas, resident from the start and counted by the planner.

    Args:
        begin: Function that every thread of the disk calls first; None for none.
    """

    reads_to_device = True
    """True if device memory is host memory, into which the disk is read directly."""

    def __init__(self, *, begin: Callable[[], None] | None = None) -> None:
        self.file = FileTier(begin=begin)
        self._exposed_s = 0.0

    def host_memory(self, name: str, size_bytes: int) -> Tensor:
        """Allocate host memory for fast copies: uint8, page-aligned.

        Args:
            name: What the memory is for. It may lie where that of an earlier call of this name
                lies, which must not be used any more.
            size_bytes: Bytes to allocate.

        Raises:
            MemoryError: The host lacks memory, or the memory may not be page-locked.
        """
        return HostArena(size_bytes).tensor(0, (size_bytes,), torch.uint8)

    def device_memory(self, size_bytes: int) -> Tensor:
        """Allocate device memory for blocks that come back: uint8, page-aligned.

        Raises:
            MemoryError: The device lacks memory.
        """
        return self.host_memory("device", size_bytes)

    def computed(self, tensors: Sequence[Tensor]) -> Event:
        """Return the end of all compute issued so far, which includes all uses of ``tensors``."""
        return _REACHED

    def out(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Copy from the device to host memory: here now, as a thread would take the same cores.

        The caller keeps the sources until it has called :meth:`before_compute`.
        """
        begin_s = time.perf_counter()
        for event in after:
            wait_for(event)
        for target, source in copies:
            np.copyto(as_bytes(target), as_bytes(source))
        self._exposed_s += time.perf_counter() - begin_s
        return _REACHED

    def back(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Copy from host memory to the device."""
        return self.out(copies, after=after)

    def before_compute(self, event: Event) -> None:
        """Make compute issued from now on wait for a copy, and then use what it copied.

        Raises:
            OSError: The disk failed.
        """
        begin_s = time.perf_counter()
        try:
            wait_for(event)
        finally:
            self._exposed_s += time.perf_counter() - begin_s

    def settle(self) -> None:
        """Wait between steps until no copy is in flight: on a CPU, compute has waited for all.

        Raises:
            RuntimeError: The device does not answer.
        """

    def take_times(self) -> CopyReport:
        """Return a report of the times since the last call, without bytes."""
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        out_s, back_s = self.file.take_s()
        return CopyReport(exposed_s=exposed_s, out_s=out_s, back_s=back_s)

    def close(self) -> bool:
        """Skip copies that have not started, and free file and memory; repeated calls do nothing.

        Returns:
            Whether the other copies have ended; if not, they may still use their memory.
        """
        return self.file.close()


class MappedFileLane(Lane):
    """Lane of a CPU to and from a file that is mapped into memory.

    Pages of the file are read from the disk and written to it as they are touched, so threads copy
    while compute goes on. The threads end only with :meth:`close`.

    Args:
        drop_pages: Called after each copied tensor, to drop its pages from memory.
    """

    def __init__(self, drop_pages: Callable[[], None]) -> None:
        super().__init__()
        self._threads = WorkerPool("sppo state")
        self._drop_pages = drop_pages

    def host_memory(self, name: str, size_bytes: int) -> Tensor:
        """Allocate memory of the device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def out(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Start to copy in a thread."""
        return self._threads.submit(partial(self._copy, copies), after=after)

    def close(self) -> bool:
        """Skip copies that have not started, and end the threads; repeated calls do nothing."""
        return self._threads.close()

    def _copy(self, copies: Sequence[Copy]) -> None:
        for target, source in copies:
            np.copyto(as_bytes(target), as_bytes(source))
            self._drop_pages()


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    assert tensor.is_contiguous(), "a tensor is moved in one piece"
    return tensor.detach().view(-1).view(torch.uint8).numpy()
