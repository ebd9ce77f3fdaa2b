"""File functions of the native library and their C types, see csrc/file_tier.h.

Every opened file must be closed once, and every submitted request must be forgotten once;
sppo/offload/disk/threaded_files.py does both.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

SECTOR_BYTES = 4096
"""Bytes of a sector: SPPO_FILE_SECTOR_BYTES of csrc/file_tier.h."""

_UNFINISHED = -1
_FOR_EVER_S = -1.0


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


class FileFunctions:
    """File functions; all but :meth:`wait` raise ``OSError`` with the errno that C returns."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up the file functions in ``library``.

        Raises:
            AttributeError: A library without all of the functions.
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
        """Create an unnamed file of ``size_bytes``, rounded up to sectors, and its threads."""
        file = FileStruct()
        place = os.fsencode(directory)
        code = self._open(place, size_bytes, threads, int(direct), block_bytes, ctypes.byref(file))
        _check(code)
        return file

    def submit(
        self, file: FileStruct, *, write: bool, offset_bytes: int, address: int, size_bytes: int
    ) -> int:
        """Submit a transfer and return its request; memory must stay valid until :meth:`wait`."""
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
        """Return 0 or the errno of a finished request; None if ``timeout_s`` elapses first."""
        code = int(self._wait(request, _FOR_EVER_S if timeout_s is None else timeout_s))
        return None if code == _UNFINISHED else code

    def forget(self, request: int) -> None:
        """Free ``request``, which must not be used afterwards."""
        self._forget(request)

    def measure(self, file: FileStruct) -> TotalsStruct:
        """Return the total bytes and seconds of the reads and writes of ``file`` so far."""
        totals = TotalsStruct()
        _check(self._measure(ctypes.byref(file), ctypes.byref(totals)))
        return totals

    def close(self, file: FileStruct, *, cancel: bool) -> None:
        """Complete all requests of ``file``, or cancel them, and close the file."""
        _check(self._close(ctypes.byref(file), int(cancel)))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(code, os.strerror(code))
