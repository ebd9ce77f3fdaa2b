"""Host memory of the planned size, mapped once and resident before it is used.

There is no allocator: the plan has the offsets, and the arena returns views of ranges. Pages are
made resident before a step uses them, so that no step can run out of memory. Every view keeps the
mapping alive, which is returned to the system with the last view.
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sppo.kernels.native.machine_memory import MemoryRoom, memory_room
from sppo.units import format_bytes

ALIGNMENT_BYTES = 64
"""Alignment of views: that of torch's own CPU tensors, so that kernels take the same paths."""

_HUGE_PAGE_BYTES = 2 << 20  # no two threads touch the same one
_MOST_THREADS = 16  # memory bandwidth limits the first touch with far fewer threads

_log = logging.getLogger(__name__)


class HostArena:
    """``size_bytes`` of resident host memory, zero at first.

    An arena that may grow maps addresses for its largest size, and :meth:`make_resident` takes the
    memory when it is needed. The memory is returned to the system with the arena and its last view,
    which a traceback may hold.

    Args:
        size_bytes: Planned size; mapped in whole pages, huge ones where the system has them.
        resident_bytes: First bytes to make resident at once; None for all.

    Raises:
        MemoryError: The machine or its control group has less memory, or the system refuses the
            mapping. Nothing stays mapped.
    """

    def __init__(self, size_bytes: int, *, resident_bytes: int | None = None) -> None:
        assert size_bytes > 0, "an arena has at least 1 byte"
        self.size_bytes = size_bytes
        first_bytes = size_bytes if resident_bytes is None else resident_bytes
        room = memory_room()
        _check_room(first_bytes, room)
        self._mapping = _map(size_bytes, room=room)
        self._resident_bytes = 0
        self._touch(first_bytes)

    def make_resident(self, end_bytes: int) -> None:
        """Make the bytes before ``end_bytes`` resident, as far as they are not yet.

        Raises:
            MemoryError: The machine or its control group has less memory.
        """
        if end_bytes <= self._resident_bytes:
            return
        room = replace(memory_room(), address_bytes=None)  # has addresses
        _check_room(end_bytes - self._resident_bytes, room)
        self._touch(end_bytes)

    def tensor(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a view of the bytes from ``offset_bytes`` on as a contiguous tensor.

        Every view has a storage of its own with exactly its bytes, because autograd counts versions
        per storage: writing one view does not invalidate the others.

        Args:
            offset_bytes: Multiple of :data:`ALIGNMENT_BYTES`.
            shape: Sizes of at least 0.
            dtype: Type of the view.
        """
        end_bytes = offset_bytes + math.prod(shape) * dtype.itemsize
        assert offset_bytes % ALIGNMENT_BYTES == 0, f"offset {offset_bytes} is not aligned"
        assert 0 <= offset_bytes <= end_bytes <= self.size_bytes, (
            f"bytes {offset_bytes} to {end_bytes} are not within the arena's {self.size_bytes}"
        )
        view = torch.from_numpy(self._mapping[offset_bytes:end_bytes])
        return view.view(dtype).view(tuple(shape))

    @property
    def address(self) -> int:
        """Address of the first byte, on a page boundary."""
        return int(self._mapping.ctypes.data)

    def _touch(self, end_bytes: int) -> None:
        """Write a zero to each page before ``end_bytes`` that is not resident yet."""
        begin_s, begin_bytes = time.perf_counter(), self._resident_bytes
        end_bytes = -(-end_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if end_bytes <= begin_bytes:
            return
        pages = self._mapping[begin_bytes : end_bytes : mmap.PAGESIZE]
        threads = _usable_cores()
        pages_per_block = _HUGE_PAGE_BYTES // mmap.PAGESIZE
        blocks = -(-len(pages) // pages_per_block)
        cuts = [blocks * index // threads * pages_per_block for index in range(threads + 1)]

        def touch(index: int) -> None:
            pages[cuts[index] : cuts[index + 1]].fill(0)  # without the interpreter's lock

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(touch, range(threads)))
        self._resident_bytes = end_bytes
        _log.debug(
            "host arena: %s made resident in %.2f s by %d threads",
            format_bytes(end_bytes - begin_bytes),
            time.perf_counter() - begin_s,
            threads,
        )


def _usable_cores() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _check_room(size_bytes: int, room: MemoryRoom) -> None:
    """Raise MemoryError for too large a size; touching pages would have the process killed."""
    if size_bytes > room.least_bytes:
        raise MemoryError(
            f"a host arena of {format_bytes(size_bytes)} does not fit: {room}; "
            "offload less, or end what else uses memory"
        )


def _map(size_bytes: int, *, room: MemoryRoom) -> NDArray[np.uint8]:
    """Map whole pages, none of them resident, until the last array on them is gone.

    Raises:
        MemoryError: The system refuses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or os.strerror(errno.ENOMEM)
        raise MemoryError(
            f"the system refuses to map a host arena of {format_bytes(size_bytes)} "
            f"({reason}): {room}; see ulimit -v and vm.overcommit_memory"
        ) from error
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
