"""Memory of a tier for training state: allocates tensors in host memory or on a disk."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sppo.offload.arena import ALIGNMENT_BYTES, HostArena
from sppo.offload.lane import Lane
from sppo.output_file import FULL_ERRNOS
from sppo.units import format_bytes


class StateMemory:
    """Allocator of tensors in host memory, zero at first.

    Args:
        lane: Lane of the device that computes, which copies the memory fast; None for memory that
            is not copied.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane, self._blocks = lane, 0

    def tensors(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Allocate tensors of these shapes, by name, consecutively in one block.

        Raises:
            MemoryError: The tier lacks memory, or the memory may not be page-locked.
            OSError: The disk lacks space.
        """
        begins, end = {}, 0
        for name, shape in shapes.items():
            begins[name] = end
            end += -(-prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        block = self._block(max(1, end))
        return {
            name: block[begin : begin + prod(shapes[name]) * dtype.itemsize]
            .view(dtype)
            .view(shapes[name])
            for name, begin in begins.items()
        }

    def drop_pages(self) -> None:
        """Allow the tier to drop cached pages: the tensors are not used for a while."""

    def _block(self, size_bytes: int) -> Tensor:
        if self._lane is None:
            return HostArena(size_bytes).tensor(0, (size_bytes,), torch.uint8)
        self._blocks += 1
        return self._lane.host_memory(f"state {self._blocks}", size_bytes)


class DiskMemory(StateMemory):
    """Allocator of tensors in nameless files of a directory, mapped into memory, zero at first.

    Pages are read from the disk on access. The space on the disk is reserved, so no write can find
    the disk full. Views keep their file alive; its space is freed with the last view.

    Args:
        directory: Directory on a fast local disk.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._files: list[mmap.mmap] = []

    def drop_pages(self) -> None:
        """Drop all pages from the memory of this process; the files keep what was written."""
        for file in self._files:
            file.madvise(mmap.MADV_DONTNEED)

    def _block(self, size_bytes: int) -> Tensor:
        try:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                self._files.append(mmap.mmap(file.fileno(), size_bytes))
        except OSError as error:
            if error.errno not in FULL_ERRNOS:
                raise
            raise OSError(
                error.errno,
                f"no room for {format_bytes(size_bytes)} of training state ({error.strerror}); "
                "free space, or keep more on the device (state.weights, gradients, optimizer)",
                f"activations.disk={self._directory}",
            ) from None
        return torch.frombuffer(self._files[-1], dtype=torch.uint8)
