"""A nameless file whose bytes are tensors: a tier of training state behind a CPU's memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor


class MappedFile:
    """``size_bytes`` of a disk as memory, zero at first.

    Pages come from the disk when they are read, and :meth:`forget` takes them out of the memory of
    this process again. The disk has reserved the space, so no write can find it full. Views keep
    the mapping alive; the space is free again after the last of them.

    Args:
        directory: on a local disk.
        size_bytes: at least 1.

    Raises:
        OSError: the disk has not the space, or no file can be made there.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            self._map = mmap.mmap(file.fileno(), size_bytes)

    def bytes_(self) -> Tensor:
        """All of it, uint8."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def forget(self) -> None:
        """Take all pages out of the memory of this process; what was written stays in the file."""
        self._map.madvise(mmap.MADV_DONTNEED)
