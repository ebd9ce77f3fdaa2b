"""Interface of the copy queues, and the eight orderings that copies and compute must keep.

There is one queue per direction: out of the device, from the host to a disk, from a disk to the
host, and back to the device. A queue runs its copies in order. Between queues, and between a queue
and compute, only events order anything: every copy is enqueued with the events that come before it,
each with the :class:`Ordering` that requires it.

Implementations: :mod:`sppo.offload.thread_queues` on a CPU, :mod:`sppo.offload.cuda_queues` on a
GPU, and one in the tests that runs copies in random order and checks all accesses to memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from torch import Tensor

from sppo.offload.copy_report import CopyReport


class Ordering(Enum):
    """Reasons why one event must come before another: no early read, no early overwrite."""

    PRODUCED_BEFORE_OUT = 1
    """Compute has written a tensor before it is copied out."""
    OUT_BEFORE_SOURCE_REUSE = 2
    """A tensor has been copied out before compute takes its memory for something else."""
    FILLED_BEFORE_READ = 3
    """A slot of a tier has been filled before it is read."""
    BACK_BEFORE_USE = 4
    """A tensor is back on the device before compute reads it."""
    USED_BEFORE_RING_REWRITE = 5
    """Compute has read a ring slot before the next tensor comes back into it."""
    BACK_BEFORE_SLOT_REWRITE = 6
    """A host slot has been copied back before it is filled again."""
    WRITTEN_BEFORE_SLOT_REUSE = 7
    """A host slot has been written to the disk before it is filled again."""
    READ_BEFORE_BACK = 8
    """The disk has been read into a host slot before that is copied back."""


class Event(Protocol):
    """A point in a queue, or in compute, that is reached once; a future is an event."""

    def done(self) -> bool:
        """Return whether it has been reached, without waiting."""
        ...

    def exception(self) -> BaseException | None:
        """Wait until it is reached; return what went wrong on the way, None if nothing did."""
        ...


Dependency = tuple[Ordering, Event]
"""An event that comes before a copy, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Memory of one slot."""

    place: str
    """``host`` or ``ring``."""
    index: int
    data: Tensor
    """Bytes of the region, uint8."""


class CopyQueues(Protocol):
    """All copy queues of one device, called only by the thread that issues compute."""

    def host_memory(self, size_bytes: int) -> Tensor:
        """Allocate the memory that tensors are copied out to: uint8, page-aligned.

        Raises:
            MemoryError: there is not that much.
        """
        ...

    def device_memory(self, size_bytes: int) -> Tensor:
        """Allocate the memory that blocks are copied back to: uint8, aligned as tensors are.

        Raises:
            MemoryError: there is not that much.
        """
        ...

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """Reserve a file on the disk for :meth:`write`; it replaces an earlier one.

        Raises:
            OSError: the directory cannot be used, or the disk has no room.
        """
        ...

    def produced(self, sources: Sequence[Tensor]) -> Event:
        """Return the end of all compute issued so far, which has written ``sources``."""
        ...

    def copy_out(
        self, host: Region, placed: Sequence[tuple[int, Tensor]], *, after: Sequence[Dependency]
    ) -> Event:
        """Copy contiguous tensors, which stay alive meanwhile, to their offsets in ``host``."""
        ...

    def reusable(self, copied: Event) -> None:
        """Let compute issued from now on reuse the memory of tensors that ``copied`` copied out."""
        ...

    def write(
        self, offset_bytes: int, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Write the first ``size_bytes`` of ``host`` to the file."""
        ...

    def read(
        self, host: Region, offset_bytes: int, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Read from the file into the first ``size_bytes`` of ``host``."""
        ...

    def copy_back(
        self, ring: Region, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Copy the first ``size_bytes`` of ``host`` to ``ring``."""
        ...

    def use(self, ring: Region, back: Event) -> None:
        """Make compute issued from now on wait for ``back``, so that it can read ``ring``.

        Raises:
            OSError: the disk failed.
        """
        ...

    def used(self, ring: Region) -> Event:
        """Return the end of all compute issued so far, the last that reads ``ring``."""
        ...

    def check(self) -> None:
        """Raise the error of the first copy that failed, if one did.

        Raises:
            OSError: a disk failed.
        """
        ...

    def abort(self) -> None:
        """Leave out copies that have not begun, wait for the others, forget errors and tensors."""
        ...

    def take_times(self) -> CopyReport:
        """Return the times since the last call; a report without bytes."""
        ...

    def close(self) -> None:
        """End the queues and release file and memory; closing again does nothing."""
        ...
