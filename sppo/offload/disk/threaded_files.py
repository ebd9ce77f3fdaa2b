"""Nameless files that serve reads and writes with threads of their own.

:class:`NativeFile` uses the native library and bypasses the page cache if the file system supports
that. :class:`PythonFile` is for machines without a compiler: it is slower and goes through the page
cache, from which every block is dropped once it is on the disk.

Both have the interface that :class:`sppo.offload.disk.file_tier.FileTier` needs. ``submit`` starts
to transfer a whole array, which must be contiguous, within the file, and kept alive by the caller
until the transfer has ended. ``submit`` returns a function that waits at most the given seconds and
returns 0, the errno of the first error, or None if the transfer has not ended. ``close`` cancels
transfers that have not started.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sppo.kernels.native.file import SECTOR_BYTES, FileFunctions
from sppo.units import MIB

_logger = logging.getLogger(__name__)

BLOCK_BYTES = 8 * MIB
"""Requests are cut at multiples of this size; several threads serve blocks of one request."""


@dataclass(frozen=True, slots=True)
class FileStatistics:
    """Measured bytes and busy time of the transfers since a file was opened."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    """Seconds in which at least one thread was reading."""
    write_s: float = 0.0
    """Seconds in which at least one thread was writing."""


class NativeFile:
    """File of the native library.

    Attributes:
        direct: Whether transfers bypass the page cache.
        preallocated: Whether the disk has reserved the space.
        memory_alignment_bytes: Alignment of addresses that are transferred without a copy.
        threads: Number of transfers that the disk serves at once.
    """

    def __init__(
        self,
        functions: FileFunctions,
        directory: Path,
        size_bytes: int,
        *,
        threads: int,
        direct: bool,
    ) -> None:
        """Create the file and start the threads.

        Raises:
            OSError: The system refused; nothing is left behind.
        """
        file = functions.open(
            directory, size_bytes, threads=threads, direct=direct, block_bytes=BLOCK_BYTES
        )
        self._functions, self._file = functions, file
        self.direct = bool(file.direct)
        self.preallocated = bool(file.preallocated)
        self.memory_alignment_bytes = int(file.memory_alignment)
        self.threads = int(file.num_threads)

    def submit(
        self, *, write: bool, offset_bytes: int, memory: NDArray[np.uint8]
    ) -> Callable[[float], int | None]:
        """Start a transfer on the library's threads; the module documents the result."""
        request = self._functions.submit(
            self._file,
            write=write,
            offset_bytes=offset_bytes,
            address=memory.ctypes.data,
            size_bytes=memory.nbytes,
        )
        outcome = partial(self._functions.wait, request)
        # Finalized when no thread can be inside `outcome` any more.
        weakref.finalize(outcome, self._functions.forget, request).atexit = False
        return outcome

    def statistics(self) -> FileStatistics:
        """Return the bytes and busy seconds so far; must not be called after :meth:`close`."""
        totals = self._functions.measure(self._file)
        return FileStatistics(
            read_bytes=int(totals.read_bytes),
            written_bytes=int(totals.written_bytes),
            read_s=float(totals.read_s),
            write_s=float(totals.write_s),
        )

    def close(self) -> None:
        """Cancel transfers that have not started, end the threads and free the space; call once."""
        self._functions.close(self._file, cancel=True)


class PythonFile:
    """File of the standard library, with the attributes of :class:`NativeFile`."""

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
        """Start a transfer, one task per block; the module documents the result."""
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
