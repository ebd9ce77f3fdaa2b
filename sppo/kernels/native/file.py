"""The file functions of the native library, with their types: see csrc/file_tier.h.

Every file that is opened must be closed once, and every request that is submitted must be forgotten
once; sppo/offload/threaded_files.py does both.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

SECTOR_BYTES = 4096
"""SPPO_FILE_SECTOR_BYTES."""

_UNFINISHED = -1
_FOR_EVER_S = -1.0


class FileStruct(ctypes.Structure):
    """``sppo_file`` of csrc/file_tier.h, which checks these offsets when it is compiled."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("size_bytes", ctypes.c_uint64),
        ("direct", ctypes.c_int32),
        ("preallocated", ctypes.c_int32),
        ("memory_alignment", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class TotalsStruct(ctypes.Structure):
    """``sppo_file_totals`` of csrc/file_tier.h, which checks these offsets, too."""

    _fields_ = (
        ("read_bytes", ctypes.c_uint64),
        ("written_bytes", ctypes.c_uint64),
        ("read_s", ctypes.c_double),
        ("write_s", ctypes.c_double),
    )


class FileFunctions:
    """The functions; each raises ``OSError`` with the errno it gets back, except :meth:`wait`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Find them in ``library``.

        Raises:
            AttributeError: it has not all of them.
        """
        file, request = ctypes.POINTER(FileStruct), ctypes.c_void_p
        self._open = library.sppo_file_open
        self._open.argtypes = (
            ctypes.c_char_p,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
            file,
        )
        self._submit = library.sppo_file_submit
        self._submit.argtypes = (
            file,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.POINTER(request),
        )
        self._wait = library.sppo_file_wait
        self._wait.argtypes = (request, ctypes.c_double)
        self._forget = library.sppo_file_forget
        self._forget.argtypes = (request,)
        self._forget.restype = None
        self._measure = library.sppo_file_measure
        self._measure.argtypes = (file, ctypes.POINTER(TotalsStruct))
        self._close = library.sppo_file_close
        self._close.argtypes = (file, ctypes.c_int)

    def open(
        self, directory: Path, size_bytes: int, *, threads: int, direct: bool, block_bytes: int
    ) -> FileStruct:
        """A nameless file of ``size_bytes``, rounded up to sectors, and the threads that serve."""
        file = FileStruct()
        place = os.fsencode(directory)
        code = self._open(place, size_bytes, threads, int(direct), block_bytes, ctypes.byref(file))
        _check(code)
        return file

    def submit(
        self, file: FileStruct, *, write: bool, offset_bytes: int, address: int, size_bytes: int
    ) -> int:
        """Ask for a transfer; the memory stays where it is until :meth:`wait` says it is done."""
        request = ctypes.c_void_p()
        code = self._submit(
            ctypes.byref(file),
            int(write),
            offset_bytes,
            address,
            size_bytes,
            ctypes.byref(request),
        )
        _check(code)
        assert request.value is not None, "a request that was taken has an address"
        return request.value

    def wait(self, request: int, timeout_s: float | None) -> int | None:
        """Return 0 or the errno of a finished request; None if not within ``timeout_s``."""
        code = int(self._wait(request, _FOR_EVER_S if timeout_s is None else timeout_s))
        return None if code == _UNFINISHED else code

    def forget(self, request: int) -> None:
        """The last use of ``request``."""
        self._forget(request)

    def measure(self, file: FileStruct) -> TotalsStruct:
        """Return the totals of what was transferred so far."""
        totals = TotalsStruct()
        _check(self._measure(ctypes.byref(file), ctypes.byref(totals)))
        return totals

    def close(self, file: FileStruct, *, cancel: bool) -> None:
        """End all requests, served or cancelled, and the file."""
        _check(self._close(ctypes.byref(file), int(cancel)))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(code, os.strerror(code))
