"""Copy queues of a CPU: one thread per direction.

Compute runs in the calling thread: issued compute is done, so its events are reached at once, and
compute waits for a copy by blocking. Device memory is host memory, so the ring and the staging
slots are both host arenas, resident from the start and counted by the planner.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sppo.offload.arena import HostArena
from sppo.offload.copy_report import CopyReport
from sppo.offload.disk.file_tier import FileTier
from sppo.offload.queues.copy_queues import Dependency, Event, Region
from sppo.offload.queues.worker_queue import WorkerQueue, close_queues, wait_for

POISON = 0xFF
"""Byte to fill overwritten memory with: NaN in every floating dtype."""


class ThreadQueues:
    """:class:`sppo.offload.queues.copy_queues.CopyQueues` of a CPU.

    Args:
        poison: Overwrite every slot after it is read, so that reading it again gives NaN.
    """

    def __init__(self, *, poison: bool = False) -> None:
        self._poison = poison
        names = ("copy out", "write", "read", "copy back")
        self._workers = tuple(WorkerQueue(f"sppo {name}") for name in names)
        self._out, self._write, self._read, self._back = self._workers
        self._file: FileTier | None = None
        self._directory: Path | None = None
        self._exposed_s = 0.0

    def host_memory(self, size_bytes: int) -> Tensor:
        """Map host memory, which is returned to the system with its last view."""
        with HostArena(size_bytes) as arena:
            return arena.tensor(0, (size_bytes,), torch.uint8)

    def device_memory(self, size_bytes: int) -> Tensor:
        """Map host memory, which on a CPU is device memory."""
        return self.host_memory(size_bytes)

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """Reserve a file in ``directory``, in place of any earlier file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._file, self._directory = FileTier(directory, size_bytes), directory

    def produced(self, sources: Sequence[Tensor]) -> Event:
        """Return a reached event: this thread has computed the tensors."""
        return _now()

    def copy_out(
        self, host: Region, placed: Sequence[tuple[int, Tensor]], *, after: Sequence[Dependency]
    ) -> Event:
        """Enqueue a copy of tensors to their offsets in ``host``."""
        target = host.data.numpy()

        def copy() -> None:
            for offset, source in placed:
                data = as_bytes(source)
                np.copyto(target[offset : offset + data.nbytes], data)

        return self._out.submit(copy, after=_futures(after))

    def reusable(self, copied: Event) -> None:
        """Wait for the copy, whose reference keeps the tensors alive."""
        self._wait(copied)

    def write(
        self, offset_bytes: int, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Enqueue a write to the file."""
        data = host.data.numpy()[:size_bytes]
        return self._write.submit(
            lambda: self._transfer(offset_bytes, data, write=True), after=_futures(after)
        )

    def read(
        self, host: Region, offset_bytes: int, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Enqueue a read from the file."""
        data = host.data.numpy()[:size_bytes]
        return self._read.submit(
            lambda: self._transfer(offset_bytes, data, write=False), after=_futures(after)
        )

    def copy_back(
        self, ring: Region, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Enqueue a copy from ``host`` to ``ring``."""
        target, source = ring.data.numpy()[:size_bytes], host.data.numpy()[:size_bytes]

        def copy() -> None:
            np.copyto(target, source)
            if self._poison:
                source.fill(POISON)

        return self._back.submit(copy, after=_futures(after))

    def use(self, ring: Region, back: Event) -> None:
        """Wait until ``ring`` is filled."""
        self._wait(back)

    def used(self, ring: Region) -> Event:
        """Return a reached event: this thread has read ``ring``."""
        if self._poison:
            ring.data.fill_(POISON)
        return _now()

    def check(self) -> None:
        """Raise the error of the first failed copy, if any."""
        for worker in self._workers:
            worker.check()

    def abort(self) -> bool:
        """Skip copies that have not started, wait for the others, drop errors and times."""
        for worker in self._workers:
            worker.cancel()
        for worker in self._workers:
            worker.wait_all()
            worker.take_busy_s()
        self._exposed_s = 0.0
        return True

    def take_times(self) -> CopyReport:
        """Return the times since the last call."""
        busy = [worker.take_busy_s() for worker in self._workers]
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        return CopyReport(exposed_s=exposed_s, out_s=max(busy[:2]), back_s=max(busy[2:]))

    def close(self) -> None:
        """End the threads and close the file; repeated calls do nothing."""
        close_queues(self._workers)
        if self._file is not None:
            self._file.close()

    def _wait(self, event: Event) -> None:
        """Wait for ``event`` and count the time as exposed."""
        future = _future(event)
        if future.done():
            wait_for(future)  # raises its error
            return
        start = time.perf_counter()
        try:
            wait_for(future)
        finally:
            self._exposed_s += time.perf_counter() - start

    def _transfer(self, offset_bytes: int, data: NDArray[np.uint8], *, write: bool) -> None:
        assert self._file is not None, "open_file() comes before reading and writing"
        start = self._file.write if write else self._file.read
        try:
            start(offset_bytes, data).wait()
        except OSError as error:
            verb, code = "writing" if write else "reading", error.errno or errno.EIO
            raise OSError(
                code,
                f"the disk failed while {verb} {data.nbytes} bytes that are offloaded "
                f"({error.strerror}); nothing was computed from them",
                str(self._directory),
            ) from None
        if write and self._poison:
            data.fill(POISON)


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    assert tensor.is_contiguous(), "a tensor is moved in one piece"
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _now() -> Future[None]:
    """Return a reached event: all issued compute is done."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _futures(after: Sequence[Dependency]) -> list[Future[None]]:
    return [_future(event) for _, event in after]


def _future(event: Event) -> Future[None]:
    assert isinstance(event, Future), f"{event} is not of these queues"
    return event
