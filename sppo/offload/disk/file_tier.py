"""Disk tier: a nameless file with asynchronous transfers at planned offsets.

As in the host arena, there is no allocator: the plan has the offsets. The space on the disk is
reserved before the first step, so that no step can find the disk full. Transfers bypass the page
cache if the file system supports that, so offloaded bytes take no host memory.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from sppo.offload.disk.disk_room import disk_room, is_memory
from sppo.offload.worker_pool import Event, WorkerPool
from sppo.output_file import FULL_ERRNOS
from sppo.units import MIB, format_bytes

SECTOR_BYTES = 4096
"""Unit of offsets, sizes and addresses: what bypasses the page cache moves whole sectors."""
PIECE_BYTES = 8 * MIB
"""Largest piece of a transfer; several threads serve the pieces of one transfer."""
_NO_ROOM = "offload less, free space, or name a directory on another disk"
_NOT_THERE = "make it, or name a directory that is there"
_NOT_ALLOWED = "name a directory that this user can write"
_ADVICE = {
    errno.ENOENT: _NOT_THERE,
    errno.ENOTDIR: _NOT_THERE,
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: _NOT_ALLOWED,
    errno.EFBIG: "the file system, or ulimit -f, takes no file of that size",
    errno.EIO: "the disk is faulty (see dmesg): name a directory on another one",
    **dict.fromkeys(FULL_ERRNOS, _NO_ROOM),
}
_OTHER_ADVICE = "name a directory on another file system"

_Verb = Literal["writing", "reading"]

_log = logging.getLogger(__name__)


class FileTier:
    """File on a disk and the threads that transfer its bytes, freed with the process at the latest.

    The file has no name: nothing is left after a crash, and no other process can open the file.
    Requests may come from any thread, and are served concurrently and in any order: before reading
    a range, wait for its last write; before overwriting a range, wait for its reads. Disjoint
    ranges are independent. Threads and file are made by :meth:`open`.

    The times of all pieces are kept until :meth:`take_s`: call it regularly, or memory grows.

    Args:
        begin: Function that every thread calls first; None for none.
    """

    def __init__(self, *, begin: Callable[[], None] | None = None) -> None:
        self._begin = begin
        self._pool: WorkerPool | None = None
        self._file: BinaryIO | None = None
        self._busy: dict[_Verb, list[tuple[float, float]]] = {"writing": [], "reading": []}
        """Times at which pieces began and ended."""
        self.directory, self.size_bytes = Path(), 0
        self.direct = False
        """True if transfers bypass the page cache."""

    def open(self, directory: Path | str, size_bytes: int) -> None:
        """Reserve ``size_bytes`` on the disk of ``directory``, in place of any earlier file.

        Args:
            directory: Existing, writable directory on the disk to use.
            size_bytes: Planned size; rounded up to whole sectors.

        Raises:
            OSError: The directory is missing or cannot be written, or its disk lacks space. Nothing
                is left behind.
        """
        assert size_bytes > 0, "a file tier has at least 1 byte"
        if self._file is not None:
            self._file.close()  # first: both files may not fit
            self._file = None
        self.directory, self.size_bytes = Path(directory), whole_sectors(size_bytes)
        self._file = _open(self.directory, self.size_bytes)
        self.direct = _pass_page_cache(self._file.fileno())
        if self._pool is None:
            self._pool = WorkerPool("sppo disk", begin=self._begin)
        if is_memory(self.directory):
            _log.warning(
                "%s is memory, not a disk: what is offloaded there frees none", self.directory
            )
        elif not self.direct:
            _log.info("no transfers past the page cache in %s", self.directory)

    def write(
        self, offset_bytes: int, array: NDArray[np.uint8], *, after: Sequence[Event] = ()
    ) -> Future[None]:
        """Start to write all of ``array``, which must not change until the future is done.

        A failed write leaves its range of the tier undefined.

        Args:
            offset_bytes: First byte of the file to write, a multiple of :data:`SECTOR_BYTES`.
            array: Whole sectors, in memory that begins at a multiple of their size.
            after: Events that the transfer waits for.

        Raises:
            OSError: The disk failed in an earlier transfer.
        """
        return self._start(offset_bytes, array, after, "writing")

    def read(
        self, offset_bytes: int, array: NDArray[np.uint8], *, after: Sequence[Event] = ()
    ) -> Future[None]:
        """Start to read into all of ``array``, which is undefined until the future is done.

        Bytes that were never written read as zeros. Takes the arguments of :meth:`write`.
        """
        return self._start(offset_bytes, array, after, "reading")

    def take_s(self) -> tuple[float, float]:
        """Return the seconds in which the disk was (written, read) since the last call."""
        busy = self._busy
        self._busy = {"writing": [], "reading": []}
        return covered_s(busy["writing"]), covered_s(busy["reading"])

    def close(self, *, limit_s: float | None = None) -> bool:
        """Skip transfers that have not started, and free the space; repeated calls do nothing.

        Args:
            limit_s: Longest wait in seconds for the other transfers; None for no limit.

        Returns:
            Whether these have ended. If not, the file is kept until the process ends.
        """
        ended = self._pool is None or self._pool.close(limit_s=limit_s)
        if self._file is not None and ended:
            self._file.close()
        return ended

    def _start(
        self, offset_bytes: int, array: NDArray[np.uint8], after: Sequence[Event], verb: _Verb
    ) -> Future[None]:
        assert self._pool is not None, "open() comes before transfers"
        sizes = (offset_bytes, array.nbytes, array.ctypes.data)
        assert not any(n % SECTOR_BYTES for n in sizes), f"{sizes} are not whole sectors"
        assert 0 <= offset_bytes <= self.size_bytes - array.nbytes, "a range of the tier"
        memory = array.reshape(-1).data
        pieces = [
            partial(self._move, memory[begin:][:PIECE_BYTES], offset_bytes + begin, verb)
            for begin in range(0, array.nbytes, PIECE_BYTES)
        ]
        return self._pool.submit(*pieces, after=after)

    def _move(self, piece: memoryview, offset_bytes: int, verb: _Verb) -> None:
        """Transfer one piece."""
        assert self._file is not None, "open() comes before transfers"
        file, write, moved = self._file.fileno(), verb == "writing", 0
        begin_s = time.perf_counter()
        try:
            while moved < len(piece):
                count = _system_io(file, write, piece[moved:], offset_bytes + moved)
                if count == 0:  # the file has its full size, so an end of file is an error
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                moved += count
            if not self.direct:
                _leave_page_cache(file, write, offset_bytes, len(piece))
            self._busy[verb].append((begin_s, time.perf_counter()))
        except OSError as error:
            what = f"{verb} {format_bytes(len(piece))} at byte {offset_bytes}"
            fault = _fault(error.errno, f"the disk failed while {what}")
            fault.filename = str(self.directory)
            raise fault from None


def covered_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the seconds in at least one of these (begin, end)."""
    total_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted(intervals):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def whole_sectors(size_bytes: int) -> int:
    """Return ``size_bytes``, rounded up to whole sectors."""
    return -(-size_bytes // SECTOR_BYTES) * SECTOR_BYTES


def _open(directory: Path, size_bytes: int) -> BinaryIO:
    """Return a new nameless file whose space on the disk is reserved.

    Raises:
        OSError: The directory cannot be used, or its disk lacks the space.
    """
    what = f"file tier of {format_bytes(size_bytes)} in {directory}"
    try:
        if size_bytes > disk_room(directory).usable_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - outlives this
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            # Without reading ahead, which would leave in the page cache what nobody asked for.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            file.close()
            raise
        return file
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise _fault(error.errno, f"no {what}") from error
        room = disk_room(directory)
        reason = f"a {what} does not fit: {room}; {_NO_ROOM}"
        raise OSError(error.errno, reason) from None


def _pass_page_cache(file: int) -> bool:
    """Make transfers of a file bypass the page cache; return whether its file system can.

    A file system may accept the flag and refuse the transfers, so one sector is written.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, SECTOR_BYTES) as sector:
            os.pwritev(file, [sector], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True


def _system_io(file: int, write: bool, memory: memoryview, offset_bytes: int) -> int:
    """Transfer a part of ``memory``; return the number of bytes. Python retries interruptions."""
    return (os.pwritev if write else os.preadv)(file, [memory], offset_bytes)


def _leave_page_cache(file: int, write: bool, offset_bytes: int, size_bytes: int) -> None:
    """Flush written bytes to the disk, and drop the range from the page cache."""
    if write:
        os.fdatasync(file)  # only pages that are on the disk can be dropped
    os.posix_fadvise(file, offset_bytes, size_bytes, os.POSIX_FADV_DONTNEED)


def _fault(code: int | None, what: str) -> OSError:
    code = errno.EIO if code is None else code
    return OSError(code, f"{what}: {os.strerror(code)}; {_ADVICE.get(code, _OTHER_ADVICE)}")
