"""Allocator of torch's CPU tensors: a pool whose resident pages follow the bytes in use.

The C heap takes about twice the size of a layer's temporaries, and differs from run to run. If
torch allocates from the pool of csrc/memory_pool.cpp, memory on a CPU can be planned and measured
as on a GPU: allocated and reserved bytes. Without the library (:mod:`sppo.native_build`) the C heap
serves, and predictions of memory are approximate.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass, fields

import torch  # noqa: F401 (loads the library that the pool is linked against)

from sppo.cost.live_sets.tensor_sizes import LEAST_POOLED_BYTES
from sppo.kernels.native.machine_memory import memory_room
from sppo.native_build import memory_pool

_LEAST_ADDRESSES = 1 << 30
"""Fewest bytes of address space to reserve for the pool."""
_ADDRESSES_PER_BYTE = 4
"""Reserved address space per byte of available memory: address space costs nothing, and several
times the memory is never exhausted by holes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt, as in malloc.h."""
_LEAST_MAPPED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """Memory of the pool; peaks are those since :meth:`CpuAllocator.reset_peak`."""

    used_bytes: int
    """Bytes of tensors of at least :data:`LEAST_POOLED_BYTES`, in whole pages."""
    used_peak_bytes: int
    resident_bytes: int
    """Bytes of resident pages: those of tensors, and free pages kept for reuse."""
    resident_peak_bytes: int
    returned_bytes: int
    """Bytes returned to the system since the start; reusing a returned page is a page fault."""


class _MemoryStruct(ctypes.Structure):
    """C++ struct ``PoolStatistics`` of csrc/memory_pool.h, with the fields of CpuMemory."""

    _fields_ = tuple((field.name, ctypes.c_uint64) for field in fields(CpuMemory))


class CpuAllocator:
    """Pool that allocates torch's CPU tensors; created by :func:`install_cpu_allocator`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def memory(self) -> CpuMemory:
        """Return the pool's current memory figures."""
        struct = _MemoryStruct()
        self._library.sppo_cpu_allocator_statistics(ctypes.byref(struct))
        return CpuMemory(*(int(getattr(struct, field.name)) for field in fields(CpuMemory)))

    def reset_peak(self) -> None:
        """Set both peaks to the current values."""
        self._library.sppo_cpu_allocator_reset_peak()

    def trim(self) -> None:
        """Return all free pages to the system."""
        self._library.sppo_cpu_allocator_trim()


def install_cpu_allocator() -> CpuAllocator | None:
    """Make torch allocate CPU tensors from the pool, for the rest of the process; idempotent.

    Returns:
        The allocator, or None if the C heap stays: :func:`describe_cpu_allocator` says why.
    """
    installed = _install()
    return installed if isinstance(installed, CpuAllocator) else None


def describe_cpu_allocator() -> str:
    """Return a phrase that names the allocator of CPU tensors, with the reason for the C heap.

    Installs the pool if it is not installed yet.
    """
    installed = _install()
    if isinstance(installed, CpuAllocator):
        return "a pool of sppo's own"
    return f"the C heap, so predictions of memory are approximate: there is no pool ({installed})"


def _keep_heap_small() -> None:
    """Make glibc return freed blocks of at least 1 MiB to the system.

    By default glibc raises this threshold with every such block, up to 32 MiB, so that buffers of
    checkpoints and plots would stay in the heap. Torch's tensors are not affected.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # exists in glibc only
        mallopt(_M_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LEAST_MAPPED_BYTES)


@functools.cache
def _install() -> CpuAllocator | str:
    """Install the pool, compiled now if it is not yet; return it, or why there is none."""
    path = memory_pool()
    if isinstance(path, str):
        return path
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} does not load: {error}"
    addresses = max(_LEAST_ADDRESSES, _ADDRESSES_PER_BYTE * memory_room().least_bytes)
    code = library.sppo_cpu_allocator_install(
        ctypes.c_uint64(addresses), ctypes.c_uint64(LEAST_POOLED_BYTES)
    )
    if code != 0:
        return f"no addresses for it: {os.strerror(code)}; see ulimit -v"
    _keep_heap_small()
    return CpuAllocator(library)
