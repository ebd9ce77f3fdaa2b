"""Mapping of host memory in whole pages, by the native library or the standard library.

A mapping is made resident by touching every page, and returned to the system with the last array
on it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sppo.kernels.native.extension import NativeLibrary

_BLOCK_BYTES = 2 << 20  # a huge page: no two threads touch the same one


@dataclass(frozen=True, slots=True)
class HostMapping:
    """Mapping of whole pages, returned to the system with the last array on it."""

    data: NDArray[np.uint8]
    huge_pages: bool
    """True if the system accepted the advice to use huge pages."""
    touch: Callable[[int, int, int], None]
    """Function of (begin, end, threads) that makes the pages of a range of bytes resident with a
    number of threads; call before use. ``begin`` is on a page boundary."""


def native_mapping(
    library: NativeLibrary, size_bytes: int, *, huge_pages: bool, numa_node: int | None
) -> HostMapping:
    """Map memory with the native library, without touching it.

    Raises:
        OSError: The system refused; nothing is left mapped.
    """
    memory = library.reserve(size_bytes, huge_pages=huge_pages, numa_node=numa_node)
    owner = (ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)
    end = weakref.finalize(owner, library.release, memory)
    end.atexit = False  # other threads may still use the memory, and the exit frees it anyway
    return HostMapping(
        np.frombuffer(memoryview(owner), dtype=np.uint8),
        memory.huge_pages,
        lambda begin, end, threads: library.touch(memory, begin, end, threads=threads),
    )


def python_mapping(size_bytes: int, *, huge_pages: bool) -> HostMapping:
    """Map memory with the standard library, which cannot bind memory to a NUMA node.

    Raises:
        OSError: The system refused; nothing is left mapped.
    """
    # As in csrc/host_arena.c: the caller checks what is free before it touches pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        owner = mmap.mmap(-1, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
    except OverflowError as error:
        raise OSError(errno.ENOMEM, str(error)) from None
    taken = huge_pages and _advise_huge_pages(owner)
    data = np.frombuffer(owner, dtype=np.uint8)
    return HostMapping(
        data,
        taken,
        lambda begin, end, threads: _touch(data[begin : end : mmap.PAGESIZE], threads),
    )


def _touch(pages: NDArray[np.uint8], threads: int) -> None:
    """Write one byte of every page; each thread touches consecutive blocks."""
    pages_per_block = _BLOCK_BYTES // mmap.PAGESIZE
    blocks = -(-len(pages) // pages_per_block)
    cuts = [blocks * i // threads * pages_per_block for i in range(threads + 1)]

    def touch_part(i: int) -> None:
        pages[cuts[i] : cuts[i + 1]].fill(0)  # numpy releases the interpreter's lock meanwhile

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(touch_part, range(threads)))


def _advise_huge_pages(memory: mmap.mmap) -> bool:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    return True
