"""Nameless file mapped into memory as a tensor: the disk tier of training state on a CPU."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor


class MappedFile:
    """``size_bytes`` of a disk, mapped into memory, zero at first.

    Pages are read from the disk on access, and :meth:`drop_pages` drops them from the memory of
    this process. The space on the disk is reserved, so no write can find the disk full. Views keep
    the mapping alive; the space is freed with the last view.

    Args:
        directory: Directory on a local disk.
        size_bytes: Size of the file, at least 1.

    Raises:
        OSError: The disk lacks space, or no file can be created in ``directory``.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            self._map = mmap.mmap(file.fileno(), size_bytes)

    def bytes_(self) -> Tensor:
        """Return a view of the whole file, uint8."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def drop_pages(self) -> None:
        """Drop all pages from the memory of this process; the file keeps what was written."""
        self._map.madvise(mmap.MADV_DONTNEED)
