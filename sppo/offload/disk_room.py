"""How much of a disk may be taken, and whether it is one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sppo.units import GIB, format_bytes

_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_RESERVE_SHARE = 10  # a tenth
_MOST_RESERVE_BYTES = 16 * GIB


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """Bytes of the file system that holds a directory."""

    free_bytes: int
    """What this user may still write."""

    @property
    def reserve_bytes(self) -> int:
        """What stays free for checkpoints, logs and other programs: a tenth, 16 GiB at most."""
        return min(self.free_bytes // _RESERVE_SHARE, _MOST_RESERVE_BYTES)

    @property
    def usable_bytes(self) -> int:
        """What a tier may take."""
        return self.free_bytes - self.reserve_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.free_bytes)} are free there, of which "
            f"{format_bytes(self.reserve_bytes)} stay free for everything else"
        )


def disk_room(directory: Path) -> DiskRoom:
    """What may be written below ``directory`` now.

    Raises:
        OSError: there is no such directory, or it cannot be asked.
    """
    found = os.statvfs(directory)
    return DiskRoom(free_bytes=found.f_bavail * found.f_frsize)


def is_memory(directory: Path) -> bool:
    """Whether ``directory`` is a disk by name only, as /dev/shm and some systems' /tmp are."""
    try:
        device = os.stat(directory).st_dev
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return False  # not a system that tells
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0] in _MEMORY_FILE_SYSTEMS
    return False
