"""Copies between tiers as queues, and the eight orderings they and compute must keep.

There is one queue per direction: out of the device, from the host to a disk, from a disk to the
host, and back to the device. What is in a queue runs in the order of its coming; between queues,
and between a queue and compute, nothing is ordered but by events. Whoever enqueues a copy names
the events that come before it, each with the :class:`Ordering` it is there for.

Implementations: :mod:`sppo.offload.thread_queues` on a CPU, :mod:`sppo.offload.cuda_queues`, and
one in the tests whose copies run whenever its scheduler likes, under a checker of all accesses.
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
    """What must come before what, or a copy reads too early or overwrites too early."""

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
    """A point in a queue, or in compute, that is reached once."""

    @property
    def done(self) -> bool:
        """Whether it has been reached; never waits."""
        ...


Dependency = tuple[Ordering, Event]


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A slot's memory."""

    place: str
    """``host`` or ``ring``."""
    index: int
    data: Tensor
    """Its bytes, uint8."""


class CopyQueues(Protocol):
    """All queues of one device. Only the thread that issues compute calls these."""

    def host_memory(self, size_bytes: int) -> Tensor:
        """Memory that copies out go to: uint8, page-aligned.

        Raises:
            MemoryError: there is not that much.
        """
        ...

    def device_memory(self, size_bytes: int) -> Tensor:
        """Memory that copies back go to: uint8, aligned as tensors are.

        Raises:
            MemoryError: there is not that much.
        """
        ...

    def open_file(self, directory: Path, size_bytes: int) -> None:
        """Make room on the disk for :meth:`write`, in place of the file before.

        Raises:
            OSError: the directory cannot be used, or the disk has no room.
        """
        ...

    def produced(self, sources: Sequence[Tensor]) -> Event:
        """All compute issued so far; the last of it wrote ``sources``."""
        ...

    def copy_out(
        self, host: Region, pieces: Sequence[tuple[int, Tensor]], *, after: Sequence[Dependency]
    ) -> Event:
        """Copy contiguous tensors to their offsets in ``host``; keeps them alive until then."""
        ...

    def reusable(self, copied: Event) -> None:
        """Compute issued from now on may take the memory of what ``copied`` copied out."""
        ...

    def write(
        self, offset_bytes: int, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Write the first bytes of ``host`` to the file."""
        ...

    def read(
        self, host: Region, offset_bytes: int, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Read from the file into the first bytes of ``host``."""
        ...

    def copy_back(
        self, ring: Region, host: Region, size_bytes: int, *, after: Sequence[Dependency]
    ) -> Event:
        """Copy the first bytes of ``host`` to ``ring``."""
        ...

    def use(self, ring: Region, back: Event) -> None:
        """Compute issued from now on reads ``ring`` as ``back`` left it.

        Raises:
            OSError: the disk failed on its way.
        """
        ...

    def used(self, ring: Region) -> Event:
        """All compute issued so far; none after it reads ``ring`` any more."""
        ...

    def check(self) -> None:
        """Raise the error of a copy that failed, if one did.

        Raises:
            OSError: a disk failed.
        """
        ...

    def abort(self) -> None:
        """Leave out what has not begun, wait for the rest, forget errors and kept tensors."""
        ...

    def take_times(self) -> CopyReport:
        """Report where time went since the last call, without the bytes."""
        ...

    def close(self) -> None:
        """End the queues and give back file and memory. Twice is once."""
        ...
