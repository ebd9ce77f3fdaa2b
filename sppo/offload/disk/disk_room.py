"""Free disk space of a directory, and checks that a directory can be used for offloading."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sppo.units import GIB, format_bytes

_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_RESERVED_PART = 10  # a tenth
_MOST_RESERVE_BYTES = 16 * GIB


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """Free space of the file system that holds a directory."""

    free_bytes: int
    """Bytes that this user may still write."""

    @property
    def reserve_bytes(self) -> int:
        """Bytes left free for checkpoints, logs and other programs: a tenth, at most 16 GiB."""
        return min(self.free_bytes // _RESERVED_PART, _MOST_RESERVE_BYTES)

    @property
    def usable_bytes(self) -> int:
        """Bytes that a tier may use."""
        return self.free_bytes - self.reserve_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.free_bytes)} are free there, of which "
            f"{format_bytes(self.reserve_bytes)} stay free for everything else"
        )


def disk_room(directory: Path) -> DiskRoom:
    """Return the free space of the file system of ``directory``.

    Raises:
        OSError: There is no such directory, or its file system does not report free space.
    """
    found = os.statvfs(directory)
    return DiskRoom(free_bytes=found.f_bavail * found.f_frsize)


def is_memory(directory: Path) -> bool:
    """Return whether ``directory`` is in memory, like /dev/shm, and /tmp on some systems."""
    try:
        device = os.stat(directory).st_dev
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return False  # the system does not report mounts
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0] in _MEMORY_FILE_SYSTEMS
    return False


def usable_directory(directory: Path) -> DiskRoom:
    """Return the free space of ``directory``, after checking that files can be created in it.

    Raises:
        ValueError: No file can be created in ``directory``; the message says what to change.
    """
    what = f"activations.disk={directory}"
    if not directory.exists():
        raise ValueError(
            f"{what}: no such directory; make it, on a fast local disk, or leave the key out to "
            "offload nothing"
        )
    if not directory.is_dir():
        raise ValueError(f"{what}: not a directory; name one on a fast local disk")
    try:
        with tempfile.TemporaryFile(dir=directory):
            return disk_room(directory)
    except OSError as error:
        raise ValueError(
            f"{what}: no file can be made there ({os.strerror(error.errno or 0)}); name "
            "another, on a local disk that this user can write to"
        ) from None
