"""The disk tier: bytes at planned offsets of a nameless file, moved while the program goes on.

Offsets are computed in the plan, so there is no allocator here, as in the host arena. The disk's
space is set aside before the first step; nothing is discovered inside one. Where the file system
takes it, transfers pass by the page cache: what was sent away leaves the memory for good.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from sppo.kernels.native.extension import describe, native_library
from sppo.offload.python_tier_file import PythonFile
from sppo.offload.tier import disk_room, is_memory
from sppo.offload.tier_file import FileStatistics, NativeFile, TierFile, Transfer, wait_for
from sppo.output_file import FULL_ERRNOS
from sppo.units import format_bytes

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
    errno.ECANCELED: "the tier was closed before it was done",
    errno.ECHILD: "a fork has none of the threads of the process that opened the tier",
    **dict.fromkeys(FULL_ERRNOS, _NO_ROOM),
}
_OTHER_ADVICE = "name a directory on another file system"

_log = logging.getLogger(__name__)


class Ticket:
    """A read or a write that was asked for; its array stays alive until it is done."""

    def __init__(self, transfer: Transfer, *, process: int, what: str) -> None:
        """Made by :class:`FileTier` in ``process``; ``what`` begins the message of a fault."""
        self._transfer = transfer
        self._process = process
        self._what = what

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._transfer.result(0.0) is not None

    def wait(self) -> None:
        """Return when all bytes are moved; again, at once.

        Raises:
            OSError: the disk failed, or the tier was closed first. What a read that failed left in
                its array is undefined, as is what a later read finds where a write failed.
        """
        code = wait_for(self._transfer, process=self._process)
        if code != 0:
            raise _fault(code, f"{self._what} failed")


class FileTier:
    """``size_bytes`` on the disk that holds ``directory``, gone with the process at the latest.

    The file has no name: nothing is left after a crash, and no other process can meet it. Any
    thread may ask; several requests are served at once and in no order, so whoever reads a range
    waits for its last write first, and whoever overwrites it for its reads. Ranges that do not
    overlap never disturb each other.

    Full speed needs offsets and sizes in multiples of 4096 bytes and arrays on
    :attr:`memory_alignment_bytes`; anything else is just as right, and slower.
    """

    def __init__(
        self, directory: Path | str, size_bytes: int, *, threads: int = 4, direct: bool = True
    ) -> None:
        """Check the disk, set the space aside, and start the threads.

        Args:
            directory: exists and can be written; on the disk to use.
            size_bytes: as planned; taken in whole sectors of 4096 bytes.
            threads: transfers that are with the disk at once.
            direct: pass by the page cache, where the file system takes that; :attr:`direct` tells.

        Raises:
            ValueError: a size or a number of threads below 1.
            OSError: the directory is missing or cannot be written, or its disk has not the room.
                Nothing is left behind.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes={size_bytes}; a file tier has at least 1 byte")
        if threads < 1:
            raise ValueError(f"threads={threads}; at least one thread moves the bytes")
        self.directory = Path(directory)
        self.size_bytes = size_bytes
        self._process = os.getpid()
        self._file: TierFile | None = _open(
            self.directory, size_bytes, threads=threads, direct=direct
        )
        self._last = FileStatistics()
        self.direct = self._file.direct
        """Whether transfers pass by the page cache; else they go through it and are dropped."""
        self.memory_alignment_bytes = self._file.memory_alignment_bytes
        """Alignment of arrays that are transferred without a copy on the way."""
        self.threads = self._file.threads
        _log.debug("%s", self)
        self._warn(direct=direct)

    def write(self, offset_bytes: int, array: NDArray[np.uint8]) -> Ticket:
        """Begin to write all of ``array``; it must not change until the ticket is done.

        Raises:
            ValueError: closed, not within the tier, or not contiguous bytes.
            OSError: the system has no memory for the request, or this is a fork of the process
                that opened the tier.
        """
        return self._start(offset_bytes, array, write=True)

    def read(self, offset_bytes: int, array: NDArray[np.uint8]) -> Ticket:
        """Begin to fill all of ``array``; it is undefined until the ticket is done.

        What was never written reads as zeros.

        Raises:
            ValueError: as :meth:`write`, or ``array`` is read-only.
            OSError: as :meth:`write`.
        """
        if not array.flags.writeable:
            raise ValueError("the array to read into is read-only")
        return self._start(offset_bytes, array, write=False)

    def _start(self, offset_bytes: int, array: NDArray[np.uint8], *, write: bool) -> Ticket:
        if self._file is None:
            raise ValueError("the file tier is closed; it moves no more bytes")
        if array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ValueError(f"a file tier moves contiguous bytes, not {array.dtype} as it is here")
        end_bytes = offset_bytes + array.nbytes
        if offset_bytes < 0 or end_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {end_bytes} are not within the tier's {self.size_bytes}"
            )
        verb = "writing" if write else "reading"
        what = f"{verb} {format_bytes(array.nbytes)} at byte {offset_bytes} of {self._name}"
        memory = array.reshape(-1)
        try:
            transfer = self._file.start(write=write, offset_bytes=offset_bytes, memory=memory)
        except OSError as error:
            raise _fault(error.errno, f"{what} failed") from error
        return Ticket(transfer, process=self._process, what=what)

    @property
    def statistics(self) -> FileStatistics:
        """What was moved so far, and how long that took; measured."""
        return self._last if self._file is None else self._file.statistics()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._file is None

    def close(self, *, cancel: bool = False) -> None:
        """Serve what was asked for, then end the threads and free the space. Twice is once.

        Args:
            cancel: what no thread has begun is given up instead; its tickets raise.
        """
        file = self._file
        if file is not None:
            file.close(cancel=cancel)
            self._last = file.statistics()
            self._file = None

    def __enter__(self) -> FileTier:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(cancel=error is not None)

    @property
    def _name(self) -> str:
        return f"the file tier in {self.directory}"

    def __str__(self) -> str:
        how = "past the page cache" if self.direct else "through the page cache"
        size = format_bytes(self.size_bytes)
        return f"file tier of {size} in {self.directory}: {how}, {self.threads} threads"

    def _warn(self, *, direct: bool) -> None:
        if is_memory(self.directory):
            _log.warning(
                "%s is memory, not a disk: what is offloaded there frees none", self.directory
            )
        if direct and not self.direct:
            _log.info("no transfers past the page cache in %s (%s)", self.directory, describe())
        if self._file is not None and not self._file.preallocated:
            _log.warning(
                "the file system of %s sets no space aside: if it fills up, the run fails inside a "
                "step",
                self.directory,
            )


def _open(directory: Path, size_bytes: int, *, threads: int, direct: bool) -> TierFile:
    what = f"file tier of {format_bytes(size_bytes)} in {directory}"
    try:
        if size_bytes > disk_room(directory).usable_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        library = native_library()
        if library is None:
            return PythonFile(directory, size_bytes, threads=threads)
        return NativeFile(library.files, directory, size_bytes, threads=threads, direct=direct)
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise _fault(error.errno, f"no {what}") from error
        room = disk_room(directory)
        reason = f"a {what} does not fit: {room}; {_NO_ROOM}"
        raise OSError(error.errno, reason) from None


def _fault(code: int | None, what: str) -> OSError:
    code = errno.EIO if code is None else code
    return OSError(code, f"{what}: {os.strerror(code)}; {_ADVICE.get(code, _OTHER_ADVICE)}")
