"""Anonymous memory as bytes that give themselves back: by the native library, or by Python.

Either way the result is an array of bytes that owns its mapping. Arrays and tensors cut from it
keep it alive, and the last of them to die takes the mapping with it, so no view can outlive its
memory.
"""

from __future__ import annotations

import errno
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sppo.kernels.native.extension import NativeLibrary

_BLOCK_BYTES = 2 << 20  # a share of the first touch is whole blocks: no huge page has two threads


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
