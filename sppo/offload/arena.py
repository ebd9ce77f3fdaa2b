"""The host tier's memory: one mapping of exactly the planned size, in whole pages.

Offsets are computed in the plan, so there is no allocator here: the arena hands out views of
ranges it is told. All of it is resident once it is made; nothing is discovered inside a step.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
import weakref
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sppo.kernels.native.extension import describe, native_library
from sppo.kernels.native.machine_memory import MemoryRoom, memory_room
from sppo.offload.host_mapping import HostMapping, NativeMapping, PythonMapping
from sppo.units import format_bytes

ALIGNMENT_BYTES = 64
"""Offsets are multiples of it, as torch's own CPU tensors are: kernels take the same paths."""

_MOST_THREADS = 16  # first touch is bound by memory, not by cores, long before that

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
