"""Nameless files that the native library reads and writes with threads of its own.

The C types and functions are declared in csrc/file_tier.h. Transfers bypass the page cache if the
file system supports that.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sppo.units import MIB

SECTOR_BYTES = 4096
"""Bytes of a sector: SPPO_FILE_SECTOR_BYTES of csrc/file_tier.h."""
BLOCK_BYTES = 8 * MIB
"""Requests are cut at multiples of this size; several threads serve blocks of one request."""

_UNFINISHED = -1


class FileStruct(ctypes.Structure):
    """C struct ``sppo_file`` of csrc/file_tier.h, which asserts these offsets at compile time."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("size_bytes", ctypes.c_uint64),
        ("direct", ctypes.c_int32),
        ("preallocated", ctypes.c_int32),
        ("memory_alignment", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class TotalsStruct(ctypes.Structure):
    """C struct ``sppo_file_totals`` of csrc/file_tier.h, which asserts these offsets as well."""

    _fields_ = (
        ("read_bytes", ctypes.c_uint64),
        ("written_bytes", ctypes.c_uint64),
        ("read_s", ctypes.c_double),
        ("write_s", ctypes.c_double),
    )


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
    """File without a name, whose space is freed when it is closed.

    Attributes:
        direct: Whether transfers bypass the page cache.
        preallocated: Whether the disk has reserved the space.
        memory_alignment_bytes: Alignment of addresses that are transferred without a copy.
        threads: Number of transfers that the disk serves at once.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        directory: Path,
        size_bytes: int,
        *,
        threads: int,
        direct: bool,
    ) -> None:
        """Create a file of ``size_bytes``, rounded up to sectors, and start its threads.

        Args:
            library: Library given to :func:`declare_functions`.
            directory: Directory on the disk of the file.
            size_bytes: Size of the file.
            threads: Number of transfers that the disk serves at once.
            direct: Bypass the page cache if the file system supports that.

        Raises:
            OSError: The system refused; nothing is left behind.
        """
        file = FileStruct()
        place = os.fsencode(directory)
        opened = ctypes.byref(file)
        _check(library.sppo_file_open(place, size_bytes, threads, direct, BLOCK_BYTES, opened))
        self._library, self._file = library, file
        self.direct = bool(file.direct)
        self.preallocated = bool(file.preallocated)
        self.memory_alignment_bytes = int(file.memory_alignment)
        self.threads = int(file.num_threads)

    def submit(
        self, *, write: bool, offset_bytes: int, memory: NDArray[np.uint8]
    ) -> Callable[[float], int | None]:
        """Start to transfer a whole array on the library's threads.

        Args:
            write: True to write the array to the file, False to read it from there.
            offset_bytes: Offset in the file.
            memory: Contiguous array, kept alive by the caller until the transfer has ended.

        Returns:
            Function that waits at most the given seconds and returns 0, the errno of the first
            error, or None if the transfer has not ended.
        """
        request = ctypes.c_void_p()
        code = self._library.sppo_file_submit(
            ctypes.byref(self._file),
            write,
            offset_bytes,
            memory.ctypes.data,
            memory.nbytes,
            ctypes.byref(request),
        )
        _check(code)
        outcome = partial(_outcome, self._library, request)
        # Finalized when no thread can be inside `outcome` any more.
        weakref.finalize(outcome, self._library.sppo_file_forget, request).atexit = False
        return outcome

    def statistics(self) -> FileStatistics:
        """Return the bytes and busy seconds so far; must not be called after :meth:`close`."""
        totals = TotalsStruct()
        file = ctypes.byref(self._file)
        _check(self._library.sppo_file_measure(file, ctypes.byref(totals)))
        return FileStatistics(
            read_bytes=int(totals.read_bytes),
            written_bytes=int(totals.written_bytes),
            read_s=float(totals.read_s),
            write_s=float(totals.write_s),
        )

    def close(self) -> None:
        """Cancel transfers that have not started, end the threads and free the space; call once."""
        _check(self._library.sppo_file_close(ctypes.byref(self._file), True))


def declare_functions(library: ctypes.CDLL) -> None:
    """Tell ctypes the types of the file functions of ``library``.

    Raises:
        AttributeError: A library without all of the functions.
    """
    file, request = ctypes.POINTER(FileStruct), ctypes.c_void_p
    size, flag = ctypes.c_uint64, ctypes.c_int
    library.sppo_file_open.argtypes = (ctypes.c_char_p, size, flag, flag, size, file)
    library.sppo_file_submit.argtypes = (file, flag, size, request, size, ctypes.POINTER(request))
    library.sppo_file_wait.argtypes = (request, ctypes.c_double)
    library.sppo_file_forget.argtypes = (request,)
    library.sppo_file_forget.restype = None
    library.sppo_file_measure.argtypes = (file, ctypes.POINTER(TotalsStruct))
    library.sppo_file_close.argtypes = (file, flag)


def _outcome(library: ctypes.CDLL, request: ctypes.c_void_p, timeout_s: float) -> int | None:
    """Return 0 or the errno of a finished request; None if ``timeout_s`` elapses first."""
    code = int(library.sppo_file_wait(request, timeout_s))
    return None if code == _UNFINISHED else code


def _check(code: int) -> None:
    if code != 0:
        raise OSError(code, os.strerror(code))
