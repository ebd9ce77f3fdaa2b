"""A nameless file that serves reads and writes with threads of its own, by the native library.

It keeps the memory of every transfer alive until the transfer is done, whatever becomes of the
objects that asked for it. The same in Python alone: sppo/offload/python_tier_file.py.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sppo.kernels.native.file import FileFunctions, FileStruct
from sppo.units import MIB

BLOCK_BYTES = 8 * MIB
"""A request is cut at multiples of it, and its blocks are served by several threads at once."""

_PATIENCE_S = 0.2  # between two looks of a waiter, when the interpreter handles signals as Ctrl-C


@dataclass(frozen=True, slots=True)
class FileStatistics:
    """What a tier has moved since it was opened."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    """Seconds in which at least one thread was reading."""
    write_s: float = 0.0
    """Seconds in which at least one thread was writing."""

    @property
    def read_bytes_per_s(self) -> float:
        """Measured; 0 before the first read."""
        return self.read_bytes / self.read_s if self.read_s > 0 else 0.0

    @property
    def write_bytes_per_s(self) -> float:
        """Measured; 0 before the first write."""
        return self.written_bytes / self.write_s if self.write_s > 0 else 0.0


class Transfer(Protocol):
    """A read or a write that was asked for."""

    def result(self, timeout_s: float | None) -> int | None:
        """0 or the errno of the first fault; None: not done within ``timeout_s`` (None: waits)."""
        ...


class TierFile(Protocol):
    """An open file and its threads."""

    size_bytes: int
    """What was asked for, in whole sectors."""
    direct: bool
    """Past the page cache; else through it and out of it again."""
    preallocated: bool
    """Whether the disk has set the space aside."""
    memory_alignment_bytes: int
    """Alignment of addresses that are transferred without a copy."""
    threads: int

    def start(self, *, write: bool, offset_bytes: int, memory: NDArray[np.uint8]) -> Transfer:
        """Begin to transfer all of ``memory``, contiguous and within the file."""
        ...

    def statistics(self) -> FileStatistics:
        """Return the bytes and busy seconds so far; after :meth:`close`, in all."""
        ...

    def close(self, *, cancel: bool) -> None:
        """Serve or cancel what was asked for, end the threads, free the space. Twice is once."""
        ...


def wait_for(transfer: Transfer, *, process: int) -> int:
    """0 or the errno of ``transfer`` once it is done; ECHILD in a fork of ``process``.

    A fork has none of the threads that could ever end it.
    """
    while (code := transfer.result(_PATIENCE_S)) is None:
        if os.getpid() != process:
            return errno.ECHILD
    return code


class NativeFile:
    """A :class:`TierFile` of the native library."""

    def __init__(
        self,
        functions: FileFunctions,
        directory: Path,
        size_bytes: int,
        *,
        threads: int,
        direct: bool,
    ) -> None:
        """Make the file and start the threads.

        Raises:
            OSError: what the system said; nothing is left behind.
        """
        file = functions.open(
            directory, size_bytes, threads=threads, direct=direct, block_bytes=BLOCK_BYTES
        )
        self._functions = functions
        self._file = file
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._in_flight: set[_NativeTransfer] = set()
        # Holds the transfers, so that their memory outlives the threads that use it: also where
        # this object is just dropped, and at the interpreter's exit, when memory goes for good.
        self._end = weakref.finalize(self, _end, functions, file, self._in_flight)
        self._last = FileStatistics()
        self.size_bytes = int(file.size_bytes)
        self.direct = bool(file.direct)
        self.preallocated = bool(file.preallocated)
        self.memory_alignment_bytes = int(file.memory_alignment)
        self.threads = int(file.num_threads)

    def start(self, *, write: bool, offset_bytes: int, memory: NDArray[np.uint8]) -> Transfer:
        """Start to read or write ``memory`` at an offset, on the library's threads."""
        with self._lock:
            for earlier in tuple(self._in_flight):
                earlier.result(0.0)  # lets go of memory that nobody has waited for
            transfer = _NativeTransfer(self._functions, memory, self._in_flight)
            transfer.submit(self._file, write=write, offset_bytes=offset_bytes)
            return transfer

    def statistics(self) -> FileStatistics:
        """Return the bytes and busy seconds so far; after :meth:`close`, in all."""
        with self._lock:
            return self._measure() if self._end.alive else self._last

    def _measure(self) -> FileStatistics:
        totals = self._functions.measure(self._file)
        return FileStatistics(
            read_bytes=int(totals.read_bytes),
            written_bytes=int(totals.written_bytes),
            read_s=float(totals.read_s),
            write_s=float(totals.write_s),
        )

    def close(self, *, cancel: bool) -> None:
        """End the threads and close the file; ``cancel`` leaves out what has not begun."""
        with self._lock:
            if not self._end.alive:
                return
            if os.getpid() == self._process:  # a fork has no threads, and locks of theirs
                if not cancel:  # waits here, where an interrupt is heard, not in the library
                    for transfer in tuple(self._in_flight):
                        wait_for(transfer, process=self._process)
                self._last = self._measure()
            self._end()


class _NativeTransfer:
    """Keeps ``memory`` until it is done, and itself in ``in_flight`` so that this holds."""

    def __init__(
        self,
        functions: FileFunctions,
        memory: NDArray[np.uint8],
        in_flight: set[_NativeTransfer],
    ) -> None:
        self._functions = functions
        self._memory: NDArray[np.uint8] | None = memory
        self._in_flight = in_flight
        self._request: int | None = None
        self._code: int | None = None

    def submit(self, file: FileStruct, *, write: bool, offset_bytes: int) -> None:
        assert self._memory is not None, "a transfer is submitted once"
        self._in_flight.add(self)
        try:
            self._request = self._functions.submit(
                file,
                write=write,
                offset_bytes=offset_bytes,
                address=self._memory.ctypes.data,
                size_bytes=self._memory.nbytes,
            )
        except OSError:
            self._in_flight.discard(self)
            raise
        except BaseException:
            # Interrupted, before or after the library took it: the memory stays to be safe.
            self._code = errno.EINTR
            raise

    def result(self, timeout_s: float | None) -> int | None:
        """Return 0 or an errno, None if it takes longer than ``timeout_s``; any thread may ask."""
        if self._code is None:
            assert self._request is not None, "it was submitted"
            self._code = self._functions.wait(self._request, timeout_s)
            if self._code is not None:
                self._memory = None
                self._in_flight.discard(self)
        return self._code

    def __del__(self) -> None:
        # Not before it is done: until then it is in flight and held there.
        if self._request is not None:
            self._functions.forget(self._request)


def _end(functions: FileFunctions, file: FileStruct, in_flight: set[_NativeTransfer]) -> None:
    functions.close(file, cancel=True)
    in_flight.clear()
