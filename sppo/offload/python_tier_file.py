"""A nameless file that serves reads and writes with threads of its own, in Python alone.

For machines without a compiler: slower, and through the page cache, from which every block is
dropped again once the disk has it.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from sppo.kernels.native.file import SECTOR_BYTES
from sppo.offload.tier_file import BLOCK_BYTES, FileStatistics, Transfer, wait_for


class PythonFile:
    """A :class:`sppo.offload.tier_file.TierFile` of the standard library."""

    def __init__(self, directory: Path, size_bytes: int, *, threads: int) -> None:
        """Make the file; threads start as they are needed.

        Raises:
            OSError: what the system said; nothing is left behind.
        """
        self.size_bytes = -(-size_bytes // SECTOR_BYTES) * SECTOR_BYTES
        self.direct = False
        self.memory_alignment_bytes = 1
        self.threads = threads
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        try:
            self.preallocated = _set_space_aside(file.fileno(), self.size_bytes)
            if hasattr(os, "posix_fadvise"):  # into the page cache no more than is asked for
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            file.close()
            raise
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._file = file
        self._meters = (_Meter(), _Meter())
        self._in_flight: set[_PythonTransfer] = set()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="sppo-file-tier")
        self._end = weakref.finalize(
            self, _end, self._executor, file, self._in_flight, self._process
        )

    def start(self, *, write: bool, offset_bytes: int, memory: NDArray[np.uint8]) -> Transfer:
        """Start to read or write ``memory`` at an offset, in blocks on the threads."""
        with self._lock:
            self._in_flight -= {other for other in self._in_flight if other.result(0.0) is not None}
            transfer = _PythonTransfer(self._file, write, self._meters[write])
            transfer.submit(self._executor, offset_bytes, memory.data)
            self._in_flight.add(transfer)
            return transfer

    def statistics(self) -> FileStatistics:
        """Return the bytes and busy seconds so far."""
        (read_bytes, read_s), (written_bytes, write_s) = (m.totals() for m in self._meters)
        return FileStatistics(read_bytes, written_bytes, read_s, write_s)

    def close(self, *, cancel: bool) -> None:
        """End the threads and close the file; ``cancel`` leaves out what has not begun."""
        with self._lock:
            if not cancel and os.getpid() == self._process:
                for transfer in self._in_flight:
                    wait_for(transfer, process=self._process)
            self._end()


class _Meter:
    """Bytes of one direction, and the time in which at least one thread moved some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._working = 0
        self._busy_s = self._since_s = 0.0

    def begin(self) -> None:
        with self._lock:
            if self._working == 0:
                self._since_s = time.perf_counter()
            self._working += 1

    def end(self, offloaded_bytes: int) -> None:
        with self._lock:
            self._working -= 1
            self._bytes += offloaded_bytes
            if self._working == 0:
                self._busy_s += time.perf_counter() - self._since_s

    def totals(self) -> tuple[int, float]:
        with self._lock:
            open_s = time.perf_counter() - self._since_s if self._working else 0.0
            return self._bytes, self._busy_s + open_s


class _PythonTransfer:
    """One task per block; once one has failed, those that have not begun do nothing."""

    def __init__(self, file: IO[bytes], write: bool, meter: _Meter) -> None:
        self._file = file
        self._write = write
        self._meter = meter
        self._failed = False
        self._blocks: list[Future[None]] = []

    def submit(self, executor: ThreadPoolExecutor, offset_bytes: int, memory: memoryview) -> None:
        at = 0
        while at < len(memory):
            place = offset_bytes + at
            size_bytes = min(BLOCK_BYTES - place % BLOCK_BYTES, len(memory) - at)
            block = memory[at : at + size_bytes]
            self._blocks.append(executor.submit(self._transfer, block, place))
            at += size_bytes

    def result(self, timeout_s: float | None) -> int | None:
        """Return 0 or the errno of the first fault; None if it takes longer than ``timeout_s``."""
        if wait(self._blocks, timeout_s).not_done:
            return None
        return next((code for code in map(_code, self._blocks) if code != 0), 0)

    def tell_cancelled(self) -> None:
        """Wake who waits for blocks that the executor has cancelled: it does not do so itself."""
        for block in self._blocks:
            if block.cancelled():
                block.set_running_or_notify_cancel()

    def _transfer(self, block: memoryview, offset_bytes: int) -> None:
        if self._failed:
            return
        fd, offloaded_bytes = self._file.fileno(), 0
        self._meter.begin()
        try:
            while offloaded_bytes < len(block):
                place = offset_bytes + offloaded_bytes
                count = _system_io(fd, self._write, block[offloaded_bytes:], place)
                if count == 0:  # the file is as long as asked for, so an end in it is a fault
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                offloaded_bytes += count
            _leave_page_cache(fd, self._write, offset_bytes, len(block))
        except BaseException:
            self._failed = True
            offloaded_bytes = 0
            raise
        finally:
            self._meter.end(offloaded_bytes)


def _code(block: Future[None]) -> int:
    """Return 0 for a block that is done, or its errno."""
    try:
        error = block.exception()
    except CancelledError:
        return errno.ECANCELED
    if error is None:
        return 0
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    raise error


def _system_io(fd: int, write: bool, memory: memoryview, offset_bytes: int) -> int:
    """Some of ``memory``; Python itself goes on after an interruption."""
    return (os.pwritev if write else os.preadv)(fd, [memory], offset_bytes)


def _leave_page_cache(fd: int, write: bool, offset_bytes: int, size_bytes: int) -> None:
    """Bring bytes to the disk, and out of the memory that this tier is to save."""
    if not hasattr(os, "posix_fadvise"):
        return
    if write:
        os.fdatasync(fd)  # only what is on the disk can be dropped
    os.posix_fadvise(fd, offset_bytes, size_bytes, os.POSIX_FADV_DONTNEED)


def _set_space_aside(fd: int, size_bytes: int) -> bool:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size_bytes)
        return True
    os.ftruncate(fd, size_bytes)
    return False


def _end(
    executor: ThreadPoolExecutor, file: IO[bytes], in_flight: set[_PythonTransfer], process: int
) -> None:
    if os.getpid() == process:  # a fork has none of the threads
        executor.shutdown(wait=False, cancel_futures=True)
        for transfer in in_flight:
            transfer.tell_cancelled()
        try:
            executor.shutdown(wait=True)
        except RuntimeError:  # garbage collected by one of its threads, which cannot await itself
            return  # and the file goes with its last transfer
    in_flight.clear()
    file.close()
