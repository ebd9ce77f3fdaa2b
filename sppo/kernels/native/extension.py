"""Native library, loaded and called through ctypes, or the reason why it is missing.

The library is compiled by :mod:`sppo.native_build` if a compiler is present, and each of its
functions has a Python fallback. Only pointers and sizes are passed, so the library does not depend
on versions of Python or torch; ctypes releases the interpreter's lock during every call.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from sppo.kernels.native.native_file import NativeFile, declare_functions
from sppo.native_build import HOST_LIBRARY, built

INTERFACE_VERSION = 2
"""SPPO_INTERFACE_VERSION of the csrc/host_arena.h that this package was written for."""

_ANY_NODE = -1


class ArenaStruct(ctypes.Structure):
    """C struct ``sppo_arena`` of csrc/host_arena.h, which asserts these offsets at compile time."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("size_bytes", ctypes.c_uint64),
        ("huge_pages", ctypes.c_int32),
        ("numa_node", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """Memory mapped by :meth:`NativeLibrary.reserve`, until :meth:`NativeLibrary.release`."""

    address: int
    size_bytes: int
    """Requested size, rounded up to whole pages."""
    huge_pages: bool
    """True if the system accepted the advice to use huge pages."""
    struct: ArenaStruct


class NativeLibrary:
    """Functions of csrc/host_arena.h and csrc/file_tier.h.

    Each raises ``OSError`` with the errno that C returns.
    """

    def __init__(self, path: Path) -> None:
        """Load the library at ``path``.

        Raises:
            OSError: A file that cannot be loaded, or a library that is not SPPO's.
            ValueError: A library with another interface version than this package.
        """
        self.path = path
        self._library = ctypes.CDLL(str(path))
        try:
            version = int(self._library.sppo_interface_version())
            # Checked before the functions, some of which an earlier interface lacks.
            if version != INTERFACE_VERSION:
                raise ValueError(
                    f"the library has interface {version}, this package needs {INTERFACE_VERSION}; "
                    "install again to rebuild it"
                )
            self._reserve = self._library.sppo_arena_reserve
            self._touch = self._library.sppo_arena_touch
            self._release = self._library.sppo_arena_release
            declare_functions(self._library)
        except AttributeError as error:
            raise OSError(errno.ENOEXEC, f"not SPPO's library: {error}") from None
        arena = ctypes.POINTER(ArenaStruct)
        self._reserve.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int, arena)
        self._touch.argtypes = (arena, ctypes.c_int)
        self._release.argtypes = (arena,)

    def reserve(
        self, size_bytes: int, *, huge_pages: bool, numa_node: int | None
    ) -> ReservedMemory:
        """Map ``size_bytes``, rounded up to pages, bound to ``numa_node`` unless it is None."""
        arena = ArenaStruct()
        node = _ANY_NODE if numa_node is None else numa_node
        _check(self._reserve(size_bytes, int(huge_pages), node, ctypes.byref(arena)))
        return ReservedMemory(
            address=int(arena.address),
            size_bytes=int(arena.size_bytes),
            huge_pages=bool(arena.huge_pages),
            struct=arena,
        )

    def touch(self, memory: ReservedMemory, begin: int, end: int, *, threads: int) -> None:
        """Make the pages of bytes [begin, end) resident by writing a zero to each page.

        ``begin`` is on a page boundary; ``threads`` threads share the work.
        """
        part = ArenaStruct(memory.address + begin, end - begin)
        _check(self._touch(ctypes.byref(part), threads))

    def release(self, memory: ReservedMemory) -> None:
        """Unmap ``memory``, which must be called once and ends every use of the memory."""
        _check(self._release(ctypes.byref(memory.struct)))

    def open_file(
        self, directory: Path, size_bytes: int, *, threads: int, direct: bool
    ) -> NativeFile:
        """Create a file in ``directory``, see :class:`NativeFile`."""
        return NativeFile(self._library, directory, size_bytes, threads=threads, direct=direct)


def native_library() -> NativeLibrary | None:
    """Return the native library, loaded at the first call, or None: :func:`describe` says why."""
    loaded = load()
    return loaded if isinstance(loaded, NativeLibrary) else None


def describe() -> str:
    """Return one line for users: ``native: …``, or ``python fallback: …`` with the reason."""
    loaded = load()
    if isinstance(loaded, NativeLibrary):
        return f"native: interface {INTERFACE_VERSION}"
    return f"python fallback: {loaded}"


@functools.cache
def load() -> NativeLibrary | str:
    """Return the library, compiled now if it is not yet, or why there is none; cached."""
    path = built(HOST_LIBRARY)
    if isinstance(path, str):
        return path
    try:
        return NativeLibrary(path)
    except (OSError, ValueError) as error:
        return f"{path} does not load: {error}"


def _check(code: int) -> None:
    if code != 0:
        raise OSError(code, os.strerror(code))
