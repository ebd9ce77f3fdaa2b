"""The allocator of torch's CPU tensors: a pool whose resident pages follow the bytes in use.

The C heap answers a layer's temporaries with about twice their size, no two runs alike. With the
pool of csrc/memory_pool.cpp behind torch, memory on a CPU can be planned and measured as on a GPU:
what is allocated, and what is reserved for it. It is built by installation where a C++ compiler and
torch are present; without it the C heap serves, and predictions of the working set are rougher.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from sppo.kernels.native.extension import why_missing
from sppo.kernels.native.machine_memory import memory_room

LIBRARY_NAME = "sppo_cpu_allocator.so"
REASON_NAME = "cpu_allocator_not_built.txt"
LEAST_POOLED_BYTES = 128 << 10
"""Smaller tensors stay in the C heap, which is good at them."""
SWITCH = "SPPO_CPU_ALLOCATOR"
"""Environment variable; ``heap`` leaves torch's allocator as it is."""

_PLACE = Path(__file__).parents[1] / "_native"
_LEAST_ADDRESSES = 1 << 30
"""Addresses that the pool begins with, at least, however little memory there is."""
_ADDRESSES_PER_BYTE = 4
"""Addresses are free; several times the memory there is, so that holes never use them up."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt, as malloc.h numbers them."""
_LEAST_MAPPED_BYTES = 1 << 20

_FIGURES = (
    "used_bytes",
    "used_peak_bytes",
    "resident_bytes",
    "resident_peak_bytes",
    "returned_bytes",
    "blocks",
)


class _MemoryStruct(ctypes.Structure):
    """``sppo_cpu_memory`` of csrc/cpu_allocator.h."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in _FIGURES)


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """Memory that the pool holds; peaks since :meth:`CpuAllocator.reset_peak`."""

    used_bytes: int
    """Bytes in tensors of at least :data:`LEAST_POOLED_BYTES`, in whole pages."""
    used_peak_bytes: int
    resident_bytes: int
    """Pages behind them, and free ones that wait for the next."""
    resident_peak_bytes: int
    returned_bytes: int
    """Given back to the system, ever; each page of it is a page fault to come."""
    blocks: int
    """Handed out, ever."""


class CpuAllocator:
    """The pool behind torch's CPU tensors; made by :func:`install_cpu_allocator`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def memory(self) -> CpuMemory:
        """Present figures."""
        struct = _MemoryStruct()
        self._library.sppo_cpu_allocator_statistics(ctypes.byref(struct))
        return CpuMemory(*(int(getattr(struct, name)) for name in _FIGURES))

    def reset_peak(self) -> None:
        """Start new peaks from the present."""
        self._library.sppo_cpu_allocator_reset_peak()

    def trim(self) -> None:
        """Give all free pages back to the system."""
        self._library.sppo_cpu_allocator_trim()


def install_cpu_allocator() -> CpuAllocator | None:
    """Put the pool behind torch's CPU tensors, for the rest of the process; twice is once.

    Returns:
        The allocator, or None where the C heap stays: :func:`describe_cpu_allocator` says why.
    """
    installed = _install(_PLACE)
    return installed if isinstance(installed, CpuAllocator) else None


def describe_cpu_allocator() -> str:
    """Return what allocates torch's CPU tensors, with the reason where it is the C heap."""
    installed = _install(_PLACE)
    if isinstance(installed, CpuAllocator):
        return f"a pool of sppo's own ({LIBRARY_NAME})"
    return f"the C heap, for there is no pool ({installed})"


def _keep_heap_small() -> None:
    """Have glibc return large blocks to the system when they are freed.

    By itself it raises the size from which it does with every such block, up to 32 MiB: buffers of
    checkpoints and plots would stay in the heap for good. Torch's tensors are not among them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's own
        mallopt(_M_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LEAST_MAPPED_BYTES)


@functools.cache
def _install(place: Path) -> CpuAllocator | str:
    """The allocator of the library in directory ``place``, or why there is none."""
    if os.environ.get(SWITCH, "").lower() == "heap":
        return f"{SWITCH}=heap"
    path = place / LIBRARY_NAME
    if not path.exists():
        return why_missing(path, reason_name=REASON_NAME, needs="g++ and torch are")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} does not load: {error}"
    library.sppo_cpu_allocator_torch.restype = ctypes.c_char_p
    built_for = library.sppo_cpu_allocator_torch().decode()
    if built_for != torch.__version__:
        return (
            f"{path} was built for torch {built_for}, this is {torch.__version__}; reinstall "
            "to rebuild it"
        )
    addresses = max(_LEAST_ADDRESSES, _ADDRESSES_PER_BYTE * memory_room().least_bytes)
    code = library.sppo_cpu_allocator_install(
        ctypes.c_uint64(addresses), ctypes.c_uint64(LEAST_POOLED_BYTES)
    )
    if code != 0:
        return f"no addresses for it: {os.strerror(code)}; see ulimit -v"
    _keep_heap_small()
    return CpuAllocator(library)
