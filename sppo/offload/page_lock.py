"""Page-locked host memory, and page-locking of mapped memory by the CUDA runtime.

The driver refuses to lock 512 GiB or more in one call, so large memory is locked in chunks. A copy
must not span two chunks, so chunks end only at addresses at which copies are cut, too.

``torch.cuda.cudart()`` has no ``cudaGetLastError``, and the runtime keeps an error until it is
queried: the next kernel launch would report the error of a failed page-lock as its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sppo.offload.arena import HostArena
from sppo.units import GIB, MIB, format_bytes

PIECE_BYTES = 32 * MIB
"""Largest single copy. Copies are cut at multiples of it in host memory: others can use the copy
engine between, and no copy spans two chunks of page-locked memory."""
CHUNK_BYTES = 64 * GIB
"""Most memory that is page-locked by one call; a multiple of :data:`PIECE_BYTES`."""


class LockedArena:
    """Page-locked host memory, of which no byte is touched or locked twice as it grows.

    Addresses for the largest size are mapped at once. Memory is taken and locked for what is asked
    for, and up to the next address at which copies are cut (:func:`spans`).

    Args:
        runtime: Result of ``torch.cuda.cudart()``.
        most_bytes: Bytes to map addresses for; more are mapped anew if more are asked for.
    """

    def __init__(self, runtime: Any, *, most_bytes: int = 0) -> None:
        self._runtime, self._most_bytes = runtime, most_bytes
        self._arena: HostArena | None = None
        self._locked: list[Tensor] = []

    def memory(self, size_bytes: int) -> Tensor:
        """Return the first ``size_bytes``, uint8; no copy may use memory of an earlier call.

        Raises:
            MemoryError: The machine lacks memory, or the driver refuses to page-lock it.
        """
        arena = self._arena
        if arena is None or size_bytes > arena.size_bytes:
            self.release()
            most_bytes = max(size_bytes, self._most_bytes)
            arena = self._arena = HostArena(most_bytes, resident_bytes=0)
        begin = sum(part.nbytes for part in self._locked)
        if size_bytes > begin:
            cut = -(-(arena.address + size_bytes) // PIECE_BYTES) * PIECE_BYTES - arena.address
            end = min(cut, arena.size_bytes)
            arena.make_resident(end)
            part = arena.tensor(begin, (end - begin,), torch.uint8)
            lock_pages(self._runtime, part)
            self._locked.append(part)  # a reference, so that no page is unmapped while locked
        return arena.tensor(0, (size_bytes,), torch.uint8)

    def release(self) -> None:
        """Unlock the memory, which no copy may use any more, and free it with its last view."""
        for part in self._locked:
            unlock_pages(self._runtime, part)
        self._locked.clear()
        self._arena = None


def spans(memory: Tensor, *, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of consecutive spans of contiguous memory, as byte offsets.

    Every span but the last ends at an address that is a multiple of :data:`PIECE_BYTES`.

    Args:
        memory: Contiguous host tensor.
        most_bytes: Largest span; a multiple of :data:`PIECE_BYTES`.
    """
    address, begin = memory.data_ptr(), 0
    while begin < memory.nbytes:
        cut = (address + begin + most_bytes) // PIECE_BYTES * PIECE_BYTES - address
        end = min(memory.nbytes, cut)
        yield begin, end
        begin = end


def lock_pages(runtime: Any, memory: Tensor) -> None:
    """Page-lock all of ``memory``, or nothing.

    Args:
        runtime: Result of ``torch.cuda.cudart()``.
        memory: Contiguous host tensor, which must stay mapped until it is unlocked.

    Raises:
        MemoryError: The driver refuses.
    """
    for begin, end in spans(memory, most_bytes=CHUNK_BYTES):
        address = memory.data_ptr() + begin
        failure = runtime.cudaHostRegister(address, end - begin, 0)
        if int(failure) != 0:
            why = runtime.cudaGetErrorString(failure)
            forget_last_error()
            unlock_pages(runtime, memory[:begin])
            raise MemoryError(
                f"the NVIDIA driver refuses to page-lock {format_bytes(end - begin)} of host "
                f"memory, {format_bytes(memory.nbytes)} in all ({why}); offload less "
                "(activations.offload_ratio), or end what else uses memory"
            )


def unlock_pages(runtime: Any, memory: Tensor) -> None:
    """Unlock memory that :func:`lock_pages` locked and that no copy uses any more."""
    for begin, _ in spans(memory, most_bytes=CHUNK_BYTES):
        if int(runtime.cudaHostUnregister(memory.data_ptr() + begin)) != 0:
            forget_last_error()


def forget_last_error() -> None:
    """Clear the last error of the CUDA runtime in this thread, if the runtime is loaded."""
    version = torch.version.cuda
    if version is None:
        return
    name = f"libcudart.so.{version.split('.')[0]}"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return  # linked statically into torch, whose runtime cannot be reached from here
    library.cudaGetLastError()
