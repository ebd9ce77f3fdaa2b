"""Base class of lanes: copies between a device and the tiers behind it, ordered by events.

A lane copies out of the device and back, and writes and reads a file on a disk. Every copy is given
the events that it waits for; nothing else orders copies with each other or with compute. Copies
that were enqueued earlier never wait for later ones, so copies cannot deadlock.

Implementations: :mod:`sppo.offload.cpu_lane`, :mod:`sppo.offload.cuda_lane`, and one in the tests
that runs copies in random order and checks all accesses to memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from sppo.offload.copy_report import CopyReport
from sppo.offload.disk.file_tier import FileTier
from sppo.offload.worker_pool import Event, WorkerPool

Copy = tuple[Tensor, Tensor]
"""Copy as (target, source): contiguous tensors with the same shape and dtype."""


class Lane(ABC):
    """Copies of one device, and a file; only the thread that issues compute may call the methods.

    Args:
        begin: Function that every thread of the disk calls first; None for none.
    """

    reads_to_device: bool
    """True if device memory is host memory, into which the disk is read directly."""

    def __init__(self, *, begin: Callable[[], None] | None = None) -> None:
        self._begin_thread = begin
        self._pool: WorkerPool | None = None
        self._file: FileTier | None = None

    @abstractmethod
    def host_memory(self, name: str, size_bytes: int) -> Tensor:
        """Allocate host memory for fast copies: uint8, page-aligned.

        Args:
            name: What the memory is for. It may lie where that of an earlier call of this name
                lies, which must not be used any more.
            size_bytes: Bytes to allocate.

        Raises:
            MemoryError: The host lacks memory, or the memory may not be page-locked.
        """

    @abstractmethod
    def device_memory(self, size_bytes: int) -> Tensor:
        """Allocate device memory for blocks that come back: uint8, page-aligned.

        Raises:
            MemoryError: The device lacks memory.
        """

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """Reserve a file on the disk, in place of any earlier file.

        Raises:
            OSError: The directory cannot be used, or the disk lacks space.
        """
        if self._pool is None:
            self._pool = WorkerPool("sppo disk", begin=self._begin_thread)
        self._close_file()
        self._file = None  # also if there is no room for the next one
        self._file = FileTier(directory, size_bytes, self._pool)

    @abstractmethod
    def computed(self, tensors: Sequence[Tensor]) -> Event:
        """Return the end of all compute issued so far, which includes all uses of ``tensors``."""

    @abstractmethod
    def out(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Copy from the device to host memory.

        The caller keeps the sources until it has called :meth:`before_compute`.
        """

    @abstractmethod
    def back(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Copy from host memory to the device."""

    def write(self, offset_bytes: int, data: Tensor, *, after: Sequence[Event]) -> Event:
        """Write host memory, whole sectors of uint8, to the file.

        Raises:
            OSError: The disk failed in an earlier transfer.
        """
        assert self._file is not None, "open_file() comes before writing"
        return self._file.write(offset_bytes, data.numpy(), after=after)

    def read(self, offset_bytes: int, data: Tensor, *, after: Sequence[Event]) -> Event:
        """Read the file into host memory, whole sectors of uint8."""
        assert self._file is not None, "open_file() comes before reading"
        return self._file.read(offset_bytes, data.numpy(), after=after)

    @abstractmethod
    def before_compute(self, event: Event) -> None:
        """Make compute issued from now on wait for a copy, and then use what it copied.

        Raises:
            OSError: The disk failed.
        """

    @abstractmethod
    def drain(self) -> bool:
        """Skip copies that have not started, wait for the others, drop errors and times.

        Returns:
            Whether all copies have ended; if not, they may still use their memory.
        """

    @abstractmethod
    def take_times(self) -> CopyReport:
        """Return a report of the times since the last call, without bytes."""

    @abstractmethod
    def close(self) -> None:
        """End all copies and free file and memory; repeated calls do nothing."""

    def _drain_disk(self, *, limit_s: float | None = None) -> bool:
        """Skip transfers that have not started; return whether the others ended in time."""
        return self._pool is None or self._pool.drain(limit_s=limit_s)

    def _take_disk_s(self) -> tuple[float, float]:
        """Return the seconds in which the disk was (written, read) since the last call."""
        if self._file is None:
            return 0.0, 0.0
        return self._file.writing.take_s(), self._file.reading.take_s()

    def _end_threads(self, *, waits: bool = True) -> None:
        if self._pool is not None:
            self._pool.close(waits=waits)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
