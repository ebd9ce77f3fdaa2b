"""Interface of a lane: copies between a device and the tiers behind it, ordered by events.

A lane copies out of the device and back, and writes and reads a file on a disk. Every copy is given
the events that it waits for; nothing else orders copies with each other or with compute. Copies
that were enqueued earlier never wait for later ones, so copies cannot deadlock.

Implementations: :mod:`sppo.offload.cpu_lane`, :mod:`sppo.offload.cuda_lane`, and one in the tests
that runs copies in random order and checks all accesses to memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from sppo.offload.copy_report import CopyReport

Copy = tuple[Tensor, Tensor]
"""Copy as (target, source): contiguous tensors with the same shape and dtype."""


class Event(Protocol):
    """Point in the copies, or in compute, that is reached once; futures are events."""

    def done(self) -> bool:
        """Return, without waiting, whether the event has been reached."""
        ...

    def exception(self) -> BaseException | None:
        """Wait for the event; return the error of its work, None if there was none."""
        ...


class Lane(Protocol):
    """Copies of one device; only the thread that issues compute may call the methods."""

    @property
    def reads_to_device(self) -> bool:
        """True if device memory is host memory, into which the disk is read directly."""
        ...

    def host_memory(self, name: str, size_bytes: int) -> Tensor:
        """Allocate host memory for fast copies: uint8, page-aligned.

        Args:
            name: What the memory is for. It may lie where that of an earlier call of this name
                lies, which must not be used any more.
            size_bytes: Bytes to allocate.

        Raises:
            MemoryError: The host lacks memory, or the memory may not be page-locked.
        """
        ...

    def device_memory(self, size_bytes: int) -> Tensor:
        """Allocate device memory for blocks that come back: uint8, page-aligned.

        Raises:
            MemoryError: The device lacks memory.
        """
        ...

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """Reserve a file on the disk, in place of any earlier file.

        Raises:
            OSError: The directory cannot be used, or the disk lacks space.
        """
        ...

    def computed(self, tensors: Sequence[Tensor]) -> Event:
        """Return the end of all compute issued so far, which includes all uses of ``tensors``."""
        ...

    def out(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Copy from the device to host memory.

        The caller keeps the sources until it has called :meth:`before_compute`.
        """
        ...

    def back(self, copies: Sequence[Copy], *, after: Sequence[Event]) -> Event:
        """Copy from host memory to the device."""
        ...

    def write(self, offset_bytes: int, data: Tensor, *, after: Sequence[Event]) -> Event:
        """Write host memory, whole sectors of uint8, to the file."""
        ...

    def read(self, offset_bytes: int, data: Tensor, *, after: Sequence[Event]) -> Event:
        """Read the file into host memory, whole sectors of uint8."""
        ...

    def before_compute(self, event: Event) -> None:
        """Make compute issued from now on wait for a copy, and then use what it copied.

        Raises:
            OSError: The disk failed.
        """
        ...

    def check(self) -> None:
        """Raise the error of the first failed transfer of the disk, if any.

        Raises:
            OSError: A disk failed.
        """
        ...

    def drain(self) -> bool:
        """Skip copies that have not started, wait for the others, drop errors and times.

        Returns:
            Whether all copies have ended; if not, they may still use their memory.
        """
        ...

    def take_times(self) -> CopyReport:
        """Return a report of the times since the last call, without bytes."""
        ...

    def close(self) -> None:
        """End all copies and free file and memory; repeated calls do nothing."""
        ...
