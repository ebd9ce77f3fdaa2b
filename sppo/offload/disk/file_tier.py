"""Disk tier: a nameless file with asynchronous transfers at planned offsets.

As in the host arena, there is no allocator: the plan has the offsets. The space on the disk is
reserved before the first step, so that no step can find the disk full. Transfers bypass the page
cache if the file system supports that, so offloaded bytes take no host memory.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from sppo.kernels.native.extension import describe, native_library
from sppo.kernels.native.native_file import FileStatistics, NativeFile
from sppo.offload.disk.disk_room import disk_room, is_memory
from sppo.offload.disk.python_file import PythonFile
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
_POLL_S = 0.2
"""Seconds after which a waiter returns to the interpreter, which then handles signals (Ctrl-C)."""

_log = logging.getLogger(__name__)


class Transfer:
    """Read or write in flight, made by :class:`FileTier`; keeps its array alive until the end."""

    def __init__(
        self,
        outcome: Callable[[float], int | None],
        memory: NDArray[np.uint8],
        *,
        name: Callable[[], str],
    ) -> None:
        self._outcome, self._name = outcome, name
        self._memory: NDArray[np.uint8] | None = memory
        self._process = os.getpid()
        self._code: int | None = None

    def done(self) -> bool:
        """Return whether the transfer has ended, so that :meth:`wait` would not block."""
        return self._poll(0.0) is not None

    def wait(self) -> None:
        """Wait until all bytes are transferred; may be called again.

        Raises:
            OSError: The disk failed, the tier was closed before the end, or this process is a fork
                of the one that started the transfer, without its threads. A failed read leaves its
                array undefined; a failed write leaves its range of the tier undefined.
        """
        code = self.join()
        if code != 0:
            raise _fault(code, f"{self._name()} failed")

    def join(self) -> int:
        """Wait until the transfer has ended; return 0, or the errno of its failure."""
        while (code := self._poll(_POLL_S)) is None:
            if os.getpid() != self._process:
                return errno.ECHILD
        return code

    def _poll(self, timeout_s: float) -> int | None:
        """Return 0 or an errno, or None if the transfer takes longer; thread-safe."""
        if self._code is None:
            self._code = self._outcome(timeout_s)
            if self._code is not None:
                self._memory = None
        return self._code


class FileTier:
    """``size_bytes`` on the disk of ``directory``, freed when the process ends at the latest.

    The file has no name: nothing is left after a crash, and no other process can open the file.
    Requests may come from any thread, and are served concurrently and in any order: before reading
    a range, wait for its last write; before overwriting a range, wait for its reads. Disjoint
    ranges are independent.

    Transfers are fastest if offsets and sizes are multiples of 4096 bytes and arrays are aligned to
    :attr:`memory_alignment_bytes`; all others are copied through a buffer.
    """

    def __init__(
        self, directory: Path | str, size_bytes: int, *, threads: int = 4, direct: bool = True
    ) -> None:
        """Check the disk, reserve the space, and start the threads.

        Args:
            directory: Existing, writable directory on the disk to use.
            size_bytes: Planned size; rounded up to whole sectors of 4096 bytes.
            threads: Number of transfers that the disk serves at once.
            direct: Bypass the page cache if the file system supports that; the attribute
                :attr:`direct` tells whether transfers do.

        Raises:
            ValueError: The size or the number of threads is below 1.
            OSError: The directory is missing or cannot be written, or its disk lacks space. Nothing
                is left behind.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes={size_bytes}; a file tier has at least 1 byte")
        if threads < 1:
            raise ValueError(f"threads={threads}; at least one thread moves the bytes")
        self.directory = Path(directory)
        self.size_bytes = size_bytes
        self._process = os.getpid()
        self._file = _open(self.directory, size_bytes, threads=threads, direct=direct)
        self._lock = threading.Lock()
        self._in_flight: set[Transfer] = set()
        self._interrupted: list[NDArray[np.uint8]] = []
        """Arrays of requests interrupted by an exception such as Ctrl-C, which may have started."""
        # Memory must outlive the threads that use it, also if this object is dropped unclosed, and
        # at the interpreter's exit.
        self._end = weakref.finalize(self, _end, self._file, self._in_flight, self._interrupted)
        self._last = FileStatistics()
        self.direct = self._file.direct
        """True if transfers bypass the page cache."""
        self.memory_alignment_bytes = self._file.memory_alignment_bytes
        """Alignment of arrays that are transferred without a copy."""
        self.threads = self._file.threads
        _log.debug("%s", self)
        self._warn(direct=direct)

    def write(self, offset_bytes: int, array: NDArray[np.uint8]) -> Transfer:
        """Start to write all of ``array``, which must not change until the transfer is done.

        Raises:
            ValueError: The tier is closed, the range is not within the tier, or ``array`` is not
                contiguous uint8.
            OSError: The system lacks memory for the request, or this process is a fork of the one
                that opened the tier.
        """
        return self._start(offset_bytes, array, write=True)

    def read(self, offset_bytes: int, array: NDArray[np.uint8]) -> Transfer:
        """Start to read into all of ``array``, which is undefined until the transfer is done.

        Bytes that were never written read as zeros.

        Raises:
            ValueError: As for :meth:`write`, or ``array`` is read-only.
            OSError: As for :meth:`write`.
        """
        if not array.flags.writeable:
            raise ValueError("the array to read into is read-only")
        return self._start(offset_bytes, array, write=False)

    def _start(self, offset_bytes: int, array: NDArray[np.uint8], *, write: bool) -> Transfer:
        if array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ValueError(f"a file tier moves contiguous bytes, not {array.dtype} as it is here")
        end_bytes = offset_bytes + array.nbytes
        if offset_bytes < 0 or end_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {end_bytes} are not within the tier's {self.size_bytes}"
            )
        verb = "writing" if write else "reading"
        name = partial(_name_of, verb, array.nbytes, offset_bytes, self.directory)
        if os.getpid() != self._process:
            raise _fault(errno.ECHILD, f"{name()} failed")
        memory = array.reshape(-1)
        with self._lock:
            if self.closed:
                raise ValueError("the file tier is closed; it moves no more bytes")
            for earlier in [transfer for transfer in self._in_flight if transfer.done()]:
                self._in_flight.discard(earlier)
            try:
                outcome = self._file.submit(write=write, offset_bytes=offset_bytes, memory=memory)
                transfer = Transfer(outcome, memory, name=name)
                self._in_flight.add(transfer)
            except OSError as error:
                raise _fault(error.errno, f"{name()} failed") from error
            except BaseException:
                self._interrupted.append(memory)
                raise
        return transfer

    @property
    def statistics(self) -> FileStatistics:
        """Measured bytes and busy time of all transfers so far."""
        with self._lock:
            return self._last if self.closed else self._file.statistics()

    @property
    def closed(self) -> bool:
        """True if :meth:`close` was called."""
        return not self._end.alive

    def close(self, *, cancel: bool = False) -> None:
        """Finish all requests, end the threads and free the space; repeated calls do nothing.

        Args:
            cancel: Cancel requests that no thread has started; waiting for them then raises.
        """
        with self._lock:
            if self.closed:
                return
            if os.getpid() == self._process:
                if not cancel:
                    for transfer in self._in_flight:
                        transfer.join()
                self._last = self._file.statistics()
            self._end()

    def __enter__(self) -> FileTier:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(cancel=error is not None)

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
        if not self._file.preallocated:
            _log.warning(
                "the file system of %s sets no space aside: if it fills up, the run fails inside a "
                "step",
                self.directory,
            )


def _name_of(verb: str, size_bytes: int, offset_bytes: int, directory: Path) -> str:
    """Return the name of a transfer in messages."""
    size = format_bytes(size_bytes)
    return f"{verb} {size} at byte {offset_bytes} of the file tier in {directory}"


def _open(
    directory: Path, size_bytes: int, *, threads: int, direct: bool
) -> NativeFile | PythonFile:
    what = f"file tier of {format_bytes(size_bytes)} in {directory}"
    try:
        if size_bytes > disk_room(directory).usable_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        library = native_library()
        if library is None:
            return PythonFile(directory, size_bytes, threads=threads)
        return library.open_file(directory, size_bytes, threads=threads, direct=direct)
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise _fault(error.errno, f"no {what}") from error
        room = disk_room(directory)
        reason = f"a {what} does not fit: {room}; {_NO_ROOM}"
        raise OSError(error.errno, reason) from None


def _end(
    file: NativeFile | PythonFile,
    in_flight: set[Transfer],
    interrupted: list[NDArray[np.uint8]],
) -> None:
    """Close the file, and only then drop the arrays that its threads used."""
    file.close()
    in_flight.clear()
    interrupted.clear()


def _fault(code: int | None, what: str) -> OSError:
    code = errno.EIO if code is None else code
    return OSError(code, f"{what}: {os.strerror(code)}; {_ADVICE.get(code, _OTHER_ADVICE)}")
