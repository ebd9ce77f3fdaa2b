"""Nameless file of the standard library, for machines without the native library.

It is slower than :class:`sppo.kernels.native.native_file.NativeFile` and goes through the page
cache, from which every block is dropped once it is on the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sppo.kernels.native.native_file import BLOCK_BYTES, SECTOR_BYTES, FileStatistics

_logger = logging.getLogger(__name__)


class PythonFile:
    """File of the standard library, with the interface of the native file."""

    def __init__(self, directory: Path, size_bytes: int, *, threads: int) -> None:
        """Create the file; threads start as they are needed.

        Raises:
            OSError: The system refused; nothing is left behind.
        """
        self.direct = False
        self.memory_alignment_bytes = 1
        self.threads = threads
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        try:
            sectors = -(-size_bytes // SECTOR_BYTES)
            self.preallocated = _reserve_space(file.fileno(), sectors * SECTOR_BYTES)
            if hasattr(os, "posix_fadvise"):  # no read-ahead into the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            file.close()
            raise
        self._file = file
        self._process = os.getpid()
        self._meters = (_Meter(), _Meter())
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="sppo-file-tier")

    def submit(
        self, *, write: bool, offset_bytes: int, memory: NDArray[np.uint8]
    ) -> Callable[[float], int | None]:
        """Start a transfer, one task per block, see :meth:`NativeFile.submit`."""
        first = offset_bytes % BLOCK_BYTES  # bytes of the first block before the transfer
        cuts = [0, *range(BLOCK_BYTES - first, memory.nbytes, BLOCK_BYTES), memory.nbytes]
        failed = threading.Event()
        blocks = [
            self._executor.submit(
                self._transfer, memory.data[start:stop], offset_bytes + start, write, failed
            )
            for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        return partial(_outcome, blocks)

    def statistics(self) -> FileStatistics:
        """Return the bytes and busy seconds so far."""
        (read_bytes, read_s), (written_bytes, write_s) = (m.totals() for m in self._meters)
        return FileStatistics(read_bytes, written_bytes, read_s, write_s)

    def close(self) -> None:
        """Cancel transfers that have not started, end the threads and free the space; call once."""
        if os.getpid() == self._process:  # forks do not inherit the threads
            try:
                self._executor.shutdown(cancel_futures=True)
            except RuntimeError:
                # Garbage-collected in one of its own threads, which cannot join itself. The file is
                # closed with the last transfer.
                return
        self._file.close()

    def _transfer(
        self, block: memoryview, offset_bytes: int, write: bool, failed: threading.Event
    ) -> None:
        """Transfer one block, unless another block of the same request has ``failed``."""
        if failed.is_set():
            return
        fd, transferred_bytes = self._file.fileno(), 0
        self._meters[write].begin()
        try:
            while transferred_bytes < len(block):
                rest, offset = block[transferred_bytes:], offset_bytes + transferred_bytes
                count = _system_io(fd, write, rest, offset)
                if count == 0:  # the file has its full size, so an end of file is an error
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                transferred_bytes += count
            _leave_page_cache(fd, write, offset_bytes, len(block))
        except BaseException:
            failed.set()
            transferred_bytes = 0
            raise
        finally:
            self._meters[write].end(transferred_bytes)


class _Meter:
    """Counts the bytes of one direction, and the time in which at least one thread is busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._working = 0
        self._busy_s = self._since_s = 0.0

    def begin(self) -> None:
        """Record that a thread starts a transfer."""
        with self._lock:
            if self._working == 0:
                self._since_s = time.perf_counter()
            self._working += 1

    def end(self, transferred_bytes: int) -> None:
        """Record that a thread has ended a transfer of some bytes."""
        with self._lock:
            self._working -= 1
            self._bytes += transferred_bytes
            if self._working == 0:
                self._busy_s += time.perf_counter() - self._since_s

    def totals(self) -> tuple[int, float]:
        """Return the bytes and the busy seconds so far."""
        with self._lock:
            open_s = time.perf_counter() - self._since_s if self._working else 0.0
            return self._bytes, self._busy_s + open_s


def _outcome(blocks: Sequence[Future[None]], timeout_s: float) -> int | None:
    """Return 0 or the errno of the first failed block; None if a block has not ended in time.

    Args:
        blocks: Futures of the blocks of one request.
        timeout_s: Longest wait for each block in seconds.
    """
    codes = []
    for block in blocks:
        try:
            error = block.exception(timeout_s)
        except TimeoutError:
            return None
        except CancelledError:
            codes.append(errno.ECANCELED)
        else:
            codes.append(0 if error is None else _errno(error))
    return next((code for code in codes if code != 0), 0)


def _errno(error: BaseException) -> int:
    """Return the errno of an OSError; for any other error EIO, after logging the error.

    Nothing is raised, because other blocks of the request may still be in flight.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    _logger.error("a transfer of saved activations failed: %r", error)
    return errno.EIO


def _system_io(fd: int, write: bool, memory: memoryview, offset_bytes: int) -> int:
    """Transfer a part of ``memory``; return the number of bytes. Python retries interruptions."""
    return (os.pwritev if write else os.preadv)(fd, [memory], offset_bytes)


def _leave_page_cache(fd: int, write: bool, offset_bytes: int, size_bytes: int) -> None:
    """Flush written bytes to the disk, and drop the range from the page cache."""
    if not hasattr(os, "posix_fadvise"):
        return
    if write:
        os.fdatasync(fd)  # only pages that are on the disk can be dropped
    os.posix_fadvise(fd, offset_bytes, size_bytes, os.POSIX_FADV_DONTNEED)


def _reserve_space(fd: int, size_bytes: int) -> bool:
    """Extend the file to ``size_bytes``; return whether the disk has reserved the space."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size_bytes)
        return True
    os.ftruncate(fd, size_bytes)
    return False
