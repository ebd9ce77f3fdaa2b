"""Interface of the copy queues, and the eight orderings that copies and compute must keep.

There is one queue per direction: out of the device, from the host to a disk, from a disk to the
host, and back to the device. A queue runs its copies in order. Copies of different queues, and
copies and compute, are ordered by events only: every copy is enqueued with the events that it waits
for, each with the :class:`Ordering` that requires it.

Implementations: :mod:`sppo.offload.queues.thread_queues` on a CPU,
:mod:`sppo.offload.queues.cuda_queues` on a GPU, and one in the tests that runs copies in random
order and checks all accesses to memory.
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
    """Required orderings of copies and compute, against early reads and early overwrites."""

    PRODUCED_BEFORE_OUT = 1
    """Compute has written a tensor before it is copied out."""
    OUT_BEFORE_SOURCE_REUSE = 2
    """A tensor has been copied out before compute reuses its memory."""
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
    """Point in a queue, or in compute, that is reached once; futures are events."""

    def done(self) -> bool:
        """Return, without waiting, whether the event has been reached."""
        ...

    def exception(self) -> BaseException | None:
        """Wait for the event; return the error of its work, None if there was none."""
        ...


Dependency = tuple[Ordering, Event]
"""Event that a copy must wait for, with the ordering that requires it."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Memory region of one slot."""

    place: str
    """``host`` or ``ring``."""
    index: int
    data: Tensor
    """Bytes of the region, uint8."""


class CopyQueues(Protocol):
    """Copy queues of one device; only the thread that issues compute may call the methods."""

    def host_memory(self, size_bytes: int) -> Tensor:
        """Allocate host memory for blocks that are copied out: uint8, page-aligned.

        It may lie where that of an earlier call lies, which must not be used any more.

        Raises:
            MemoryError: The host lacks memory.
        """
        ...

    def device_memory(self, size_bytes: int) -> Tensor:
        """Allocate device memory for blocks that are copied back: uint8, aligned for any dtype.

        Raises:
            MemoryError: The device lacks memory.
        """
        ...

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """Reserve a file on the disk for :meth:`write`, in place of any earlier file.

        Raises:
            OSError: The directory cannot be used, or the disk lacks space.
        """
        ...

    def produced(self, sources: Sequence[Tensor]) -> Event:
        """Return the end of all compute issued so far, which includes writing ``sources``."""
        ...

    def copy_out(
        self, host: Region, placed: Sequence[tuple[int, Tensor]], *, after: Sequence[Dependency]
    ) -> Event:
        """Copy contiguous tensors to their offsets in ``host``; keep them alive meanwhile."""
        ...

    def reusable(self, copied: Event) -> None:
        """Let compute issued from now on reuse the sources of the copy ``copied``."""
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
        """Make compute issued from now on wait for ``back``, after which it may read ``ring``.

        Raises:
            OSError: The disk failed.
        """
        ...

    def used(self, ring: Region) -> Event:
        """Return the end of all compute issued so far, which includes all reads of ``ring``."""
        ...

    def check(self) -> None:
        """Raise the error of the first failed copy, if any.

        Raises:
            OSError: A disk failed.
        """
        ...

    def abort(self) -> bool:
        """Skip copies that have not started, wait for the others, drop errors and tensors.

        Returns:
            Whether all copies have ended; if not, they may still use their memory.
        """
        ...

    def take_times(self) -> CopyReport:
        """Return a report of the times since the last call, without bytes."""
        ...

    def close(self) -> None:
        """End the queues and free file and memory; repeated calls do nothing."""
        ...
