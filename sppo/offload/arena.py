"""The host tier's memory: one mapping of exactly the planned size, in whole pages.

Offsets are computed in the plan, so there is no allocator here: the arena hands out views of
ranges it is told. All of it is resident once it is made; nothing is discovered inside a step. The
mapping is an array of bytes that owns it: what is cut from it keeps it alive, and the last
view to die takes it along, so none can outlive its memory.
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
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sppo.kernels.native.extension import NativeLibrary, describe, native_library
from sppo.kernels.native.machine_memory import MemoryRoom, memory_room
from sppo.units import format_bytes

ALIGNMENT_BYTES = 64
"""Offsets are multiples of it, as torch's own CPU tensors are: kernels take the same paths."""

_MOST_THREADS = 16  # first touch is bound by memory, not by cores, long before that

_BLOCK_BYTES = 2 << 20  # a share of the first touch is whole blocks: no huge page has two threads

_log = logging.getLogger(__name__)


class HostArena:
    """``size_bytes`` of host memory, zero at first, resident until it is closed.

    Views keep their memory: :meth:`close` ends the arena at once, and the mapping goes back to the
    system with the last view, so that a tensor someone still holds (a traceback does, too) can
    never point at nothing. :attr:`released` tells whether it has gone.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        huge_pages: bool = True,
        numa_node: int | None = None,
        threads: int | None = None,
    ) -> None:
        """Check the size against the machine, map, bind, and touch every page.

        Args:
            size_bytes: as planned; mapped in whole pages.
            huge_pages: advise huge pages; a system without them is no error.
            numa_node: take memory of this node and no other.
            threads: of the first touch; by default one per usable core, at most 16.

        Raises:
            ValueError: a size or a number of threads below 1, or no such node.
            MemoryError: the machine, its control group or the node has less, or the system
                refuses the mapping. Nothing stays mapped.
            OSError: the system, or the Python fallback, cannot bind memory to a node.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes={size_bytes}; an arena has at least 1 byte")
        threads = _usable_cores() if threads is None else threads
        if threads < 1:
            raise ValueError(f"threads={threads}; at least one thread touches the memory")
        self.size_bytes = size_bytes
        room = _check_room(size_bytes, numa_node=numa_node)
        mapping = _map(size_bytes, huge_pages=huge_pages, numa_node=numa_node, room=room)
        begin_s = time.perf_counter()
        mapping.touch(threads=threads)
        touch_s = time.perf_counter() - begin_s
        self.mapped_bytes = mapping.size_bytes
        """``size_bytes`` in whole pages: what it adds to the resident set."""
        self.huge_pages = mapping.huge_pages
        """Whether the system took the advice."""
        self._bytes: NDArray[np.uint8] | None = mapping.array()
        self._alive = weakref.ref(self._bytes)
        _log.debug(
            "host arena: %s made resident in %.2f s by %d threads, %s huge pages",
            format_bytes(self.mapped_bytes),
            touch_s,
            threads,
            "with" if self.huge_pages else "without",
        )

    def tensor(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The bytes from ``offset_bytes`` on as a contiguous tensor; what is there stays there.

        Every view has a storage of its own, of exactly its bytes: autograd counts versions per
        storage, so writing one view says nothing about the others.

        Args:
            offset_bytes: a multiple of :data:`ALIGNMENT_BYTES`.
            shape: sizes of at least 0.
            dtype: of the view.

        Raises:
            ValueError: closed, not aligned, a negative size, or past the planned size.
        """
        if self._bytes is None:
            raise ValueError("the arena is closed; it gives no more views")
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {tuple(shape)} has a negative size")
        if offset_bytes % ALIGNMENT_BYTES != 0:
            raise ValueError(f"offset {offset_bytes} is not a multiple of {ALIGNMENT_BYTES} bytes")
        end_bytes = offset_bytes + math.prod(shape) * dtype.itemsize
        if offset_bytes < 0 or end_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {end_bytes} are not within the arena's {self.size_bytes}"
            )
        view = torch.from_numpy(self._bytes[offset_bytes:end_bytes])
        return view.view(dtype).view(tuple(shape))

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._bytes is None

    @property
    def released(self) -> bool:
        """Whether the memory has gone back: closed, and no view is left."""
        return self._alive() is None

    def close(self) -> None:
        """Give no more views, and the memory back as soon as none is left. Twice is once."""
        self._bytes = None

    def __enter__(self) -> HostArena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)


def _check_room(size_bytes: int, *, numa_node: int | None) -> MemoryRoom:
    """Refuse before anything is touched: past that, the system kills instead of refusing."""
    room = memory_room(numa_node=numa_node)
    if size_bytes > room.least_bytes:
        raise MemoryError(
            f"a host arena of {format_bytes(size_bytes)} does not fit: {room}; "
            "offload less, or end what else uses memory"
        )
    return room


def _map(
    size_bytes: int, *, huge_pages: bool, numa_node: int | None, room: MemoryRoom
) -> HostMapping:
    library = native_library()
    try:
        if library is not None:
            return NativeMapping(library, size_bytes, huge_pages=huge_pages, numa_node=numa_node)
        if numa_node is not None:
            reason = f"binding memory to a NUMA node needs the native library ({describe()})"
            raise OSError(errno.ENOSYS, reason)
        return PythonMapping(size_bytes, huge_pages=huge_pages)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            where = "" if numa_node is None else f" on NUMA node {numa_node}"
            raise OSError(error.errno, f"no host arena{where}: {error.strerror}") from error
        raise MemoryError(
            f"the system refuses to map a host arena of {format_bytes(size_bytes)} "
            f"({error.strerror}): {room}; see ulimit -v and vm.overcommit_memory"
        ) from error


class HostMapping(Protocol):
    """Memory that lives as long as this object or an array made of it."""

    size_bytes: int
    """Whole pages."""
    huge_pages: bool
    """Whether the system took the advice to use huge pages."""

    def touch(self, *, threads: int) -> None:
        """Make every page resident; once, before first use."""
        ...

    def array(self) -> NDArray[np.uint8]:
        """All of it; keeps the mapping alive."""
        ...


class NativeMapping:
    """A mapping of the native library."""

    def __init__(
        self, library: NativeLibrary, size_bytes: int, *, huge_pages: bool, numa_node: int | None
    ) -> None:
        """Reserve, and touch nothing yet.

        Raises:
            OSError: what the system said; nothing is left mapped.
        """
        memory = library.reserve(size_bytes, huge_pages=huge_pages, numa_node=numa_node)
        end = weakref.finalize(self, library.release, memory)
        end.atexit = False  # other threads may still use it then, and the system takes it anyway
        self._library = library
        self._memory = memory
        self.size_bytes = memory.size_bytes
        self.huge_pages = memory.huge_pages

    def touch(self, *, threads: int) -> None:
        """See :class:`HostMapping`."""
        self._library.touch(self._memory, threads=threads)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """How numpy takes over memory, with this object as its owner."""
        return {
            "version": 3,
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self._memory.address, False),
        }

    def array(self) -> NDArray[np.uint8]:
        """See :class:`HostMapping`."""
        return np.asarray(self)


class PythonMapping:
    """A mapping of the standard library, which has no way to bind it to a NUMA node."""

    def __init__(self, size_bytes: int, *, huge_pages: bool) -> None:
        """Reserve, and touch nothing yet.

        Raises:
            OSError: what the system said; nothing is left mapped.
        """
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, self.size_bytes, flags=flags)
        except OverflowError as error:
            raise OSError(errno.ENOMEM, str(error)) from None
        self.huge_pages = huge_pages and _advise_huge_pages(self._map)

    def touch(self, *, threads: int) -> None:
        """See :class:`HostMapping`."""
        pages = self.array()[:: mmap.PAGESIZE]
        pages_per_block = _BLOCK_BYTES // mmap.PAGESIZE
        blocks = -(-len(pages) // pages_per_block)
        cuts = [blocks * i // threads * pages_per_block for i in range(threads + 1)]

        def touch_share(i: int) -> None:
            pages[cuts[i] : cuts[i + 1]].fill(0)  # numpy drops the interpreter's lock for it

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(touch_share, range(threads)))

    def array(self) -> NDArray[np.uint8]:
        """See :class:`HostMapping`."""
        return np.frombuffer(self._map, dtype=np.uint8)


def _advise_huge_pages(memory: mmap.mmap) -> bool:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    return True
