"""Memory of a tier for training state: allocates tensors in host memory or on a disk."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sppo.offload.arena import ALIGNMENT_BYTES
from sppo.offload.disk.mapped_file import MappedFile
from sppo.offload.lane import Lane
from sppo.units import format_bytes


class StateMemory(Protocol):
    """Allocator of tensors in a tier."""

    def tensors(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Allocate tensors of these shapes, by name, consecutively in one block.

        Raises:
            MemoryError: The tier lacks memory, or the memory may not be page-locked.
            OSError: The disk lacks space.
        """
        ...

    def drop_pages(self) -> None:
        """Allow the tier to drop cached pages: the tensors are not used for a while."""
        ...


class LockedHostMemory:
    """:class:`StateMemory` in page-locked host memory, so that copies are asynchronous.

    Args:
        lane: Lane of the device that computes.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane, self._blocks = lane, 0

    def tensors(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Allocate tensors in page-locked host memory."""
        self._blocks += 1
        size_bytes = _block_bytes(shapes, dtype)
        return _views(self._lane.host_memory(f"state {self._blocks}", size_bytes), shapes, dtype)

    def drop_pages(self) -> None:
        """Do nothing: page-locked memory stays resident."""


class DiskMemory:
    """:class:`StateMemory` in nameless files of a directory.

    Args:
        directory: Directory on a fast local disk.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[MappedFile] = []

    def tensors(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Allocate tensors in a new file."""
        size_bytes = _block_bytes(shapes, dtype)
        try:
            self._files.append(MappedFile(self._directory, size_bytes))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"no room for {format_bytes(size_bytes)} of training state ({error.strerror}); "
                "free space, or keep more on the device (state.weights, gradients, optimizer)",
                f"activations.disk={self._directory}",
            ) from None
        return _views(self._files[-1].bytes_(), shapes, dtype)

    def drop_pages(self) -> None:
        """Drop the pages of all files from the memory of this process."""
        for file in self._files:
            file.drop_pages()


def _begins(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor in the block, and the size of the block, in bytes."""
    begins, end = {}, 0
    for name, shape in shapes.items():
        begins[name] = end
        end += -(-prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return begins, end


def _block_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    return max(1, _begins(shapes, dtype)[1])


def _views(
    block: Tensor, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    begins, _ = _begins(shapes, dtype)
    return {
        name: block[begins[name] : begins[name] + prod(shape) * dtype.itemsize]
        .view(dtype)
        .view(shape)
        for name, shape in shapes.items()
    }
