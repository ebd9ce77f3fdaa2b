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
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sppo.kernels.native.extension import describe, native_library
from sppo.kernels.native.machine_memory import MemoryRoom, memory_room
from sppo.offload.host_mapping import HostMapping, native_mapping, python_mapping
from sppo.units import format_bytes

ALIGNMENT_BYTES = 64
"""Alignment of views: that of torch's own CPU tensors, so that kernels take the same paths."""

_MOST_THREADS = 16  # memory bandwidth limits the first touch with far fewer threads

_log = logging.getLogger(__name__)


class HostArena:
    """``size_bytes`` of host memory, zero at first, resident until the arena is closed.

    An arena that may grow maps addresses for its largest size, and :meth:`make_resident` takes the
    memory when it is needed.

    After :meth:`close` the arena returns no more views, but existing views stay valid: the memory
    is returned to the system with the last view, which a traceback may hold. :attr:`released` tells
    whether the memory has been returned.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        resident_bytes: int | None = None,
        huge_pages: bool = True,
        numa_node: int | None = None,
        threads: int | None = None,
    ) -> None:
        """Check the size against the machine; map and bind memory, and touch its pages.

        Args:
            size_bytes: Planned size; mapped in whole pages.
            resident_bytes: First bytes to make resident at once; None for all.
            huge_pages: Advise the system to use huge pages, if it has them.
            numa_node: NUMA node that all memory must come from; None for any.
            threads: Number of threads of the first touch; by default one per usable core, at most
                16.

        Raises:
            ValueError: A size or a number of threads is below 1, or there is no such node.
            MemoryError: The machine, its control group or the node has less memory, or the system
                refuses the mapping. Nothing stays mapped.
            OSError: The system, or the Python fallback, cannot bind memory to a node.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes={size_bytes}; an arena has at least 1 byte")
        threads = _usable_cores() if threads is None else threads
        if threads < 1:
            raise ValueError(f"threads={threads}; at least one thread touches the memory")
        self.size_bytes = size_bytes
        self._numa_node, self._threads = numa_node, threads
        first_bytes = size_bytes if resident_bytes is None else resident_bytes
        room = memory_room(numa_node=numa_node)
        _check_room(first_bytes, room)
        mapping = _map(size_bytes, huge_pages=huge_pages, numa_node=numa_node, room=room)
        self.mapped_bytes = mapping.data.nbytes
        """``size_bytes`` rounded up to whole pages, which a resident arena adds to the process."""
        self.huge_pages = mapping.huge_pages
        """True if the system accepted the advice to use huge pages."""
        self._mapping: HostMapping | None = mapping
        self._alive = weakref.ref(mapping.data)
        self._resident_bytes = 0
        self._touch(mapping, first_bytes)

    def make_resident(self, end_bytes: int) -> None:
        """Make the bytes before ``end_bytes`` resident, as far as they are not yet.

        Raises:
            ValueError: The arena is closed.
            MemoryError: The machine, its control group or the node has less memory.
        """
        if end_bytes <= self._resident_bytes:
            return
        room = replace(memory_room(numa_node=self._numa_node), address_bytes=None)  # has addresses
        _check_room(end_bytes - self._resident_bytes, room)
        self._touch(self._mapped(), end_bytes)

    def tensor(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a view of the bytes from ``offset_bytes`` on as a contiguous tensor.

        Every view has a storage of its own with exactly its bytes, because autograd counts versions
        per storage: writing one view does not invalidate the others.

        Args:
            offset_bytes: Multiple of :data:`ALIGNMENT_BYTES`.
            shape: Sizes of at least 0.
            dtype: Type of the view.

        Raises:
            ValueError: The arena is closed, the offset is not aligned, a size is negative, or the
                view ends after the planned size.
        """
        mapping = self._mapped()
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {tuple(shape)} has a negative size")
        if offset_bytes % ALIGNMENT_BYTES != 0:
            raise ValueError(f"offset {offset_bytes} is not a multiple of {ALIGNMENT_BYTES} bytes")
        end_bytes = offset_bytes + math.prod(shape) * dtype.itemsize
        if offset_bytes < 0 or end_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {end_bytes} are not within the arena's {self.size_bytes}"
            )
        view = torch.from_numpy(mapping.data[offset_bytes:end_bytes])
        return view.view(dtype).view(tuple(shape))

    @property
    def address(self) -> int:
        """Address of the first byte, on a page boundary."""
        return int(self._mapped().data.ctypes.data)

    @property
    def closed(self) -> bool:
        """True if :meth:`close` was called."""
        return self._mapping is None

    @property
    def released(self) -> bool:
        """True if the memory was returned to the system: closed, and without views."""
        return self._alive() is None

    def close(self) -> None:
        """Return no more views, and free the memory with the last view; may be repeated."""
        self._mapping = None

    def _mapped(self) -> HostMapping:
        if self._mapping is None:
            raise ValueError("the arena is closed; it gives no more views")
        return self._mapping

    def _touch(self, mapping: HostMapping, end_bytes: int) -> None:
        """Touch the pages before ``end_bytes`` that are not resident yet."""
        begin_s, begin_bytes = time.perf_counter(), self._resident_bytes
        end_bytes = -(-end_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if end_bytes <= begin_bytes:
            return
        try:
            mapping.touch(begin_bytes, end_bytes, self._threads)
        except OSError as error:
            raise MemoryError(
                f"the system refuses {format_bytes(end_bytes - begin_bytes)} for a host arena "
                f"({error.strerror}); see vm.overcommit_memory"
            ) from error
        self._resident_bytes = end_bytes
        _log.debug(
            "host arena: %s made resident in %.2f s by %d threads, %s huge pages",
            format_bytes(end_bytes - begin_bytes),
            time.perf_counter() - begin_s,
            self._threads,
            "with" if self.huge_pages else "without",
        )

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)


def _check_room(size_bytes: int, room: MemoryRoom) -> None:
    """Raise MemoryError for too large a size; touching pages would have the process killed."""
    if size_bytes > room.least_bytes:
        raise MemoryError(
            f"a host arena of {format_bytes(size_bytes)} does not fit: {room}; "
            "offload less, or end what else uses memory"
        )


def _map(
    size_bytes: int, *, huge_pages: bool, numa_node: int | None, room: MemoryRoom
) -> HostMapping:
    library = native_library()
    try:
        if library is not None:
            return native_mapping(library, size_bytes, huge_pages=huge_pages, numa_node=numa_node)
        if numa_node is not None:
            reason = f"binding memory to a NUMA node needs the native library ({describe()})"
            raise OSError(errno.ENOSYS, reason)
        return python_mapping(size_bytes, huge_pages=huge_pages)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            where = "" if numa_node is None else f" on NUMA node {numa_node}"
            raise OSError(error.errno, f"no host arena{where}: {error.strerror}") from error
        raise MemoryError(
            f"the system refuses to map a host arena of {format_bytes(size_bytes)} "
            f"({error.strerror}): {room}; see ulimit -v and vm.overcommit_memory"
        ) from error
