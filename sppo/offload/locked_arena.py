"""Page-locked host memory that grows in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sppo.offload.arena import HostArena
from sppo.offload.page_lock import PIECE_BYTES, lock_pages, unlock_pages


class LockedArena:
    """Page-locked host memory, of which no byte is touched or locked twice as it grows.

    Addresses for the largest size are mapped at once. Memory is taken and locked for what is asked
    for, and up to the next address at which copies are cut (:func:`page_lock.spans`).

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
