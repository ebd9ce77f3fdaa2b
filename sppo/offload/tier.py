"""The tier behind the device: which one, and, of a disk, its directory and the room on it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sppo.units import GIB, format_bytes

_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_RESERVE_SHARE = 10  # a tenth
_MOST_RESERVE_BYTES = 16 * GIB


@dataclass(frozen=True, slots=True)
class Tier:
    """The memory in which offloaded tensors wait: the host's, or a disk."""

    kind: Literal["host", "disk"]
    directory: Path | None = None
    """Directory in which a disk tier makes its file."""

    def __post_init__(self) -> None:
        assert (self.directory is None) == (self.kind == "host"), "a disk has a directory"


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


def usable_directory(directory: Path) -> DiskRoom:
    """What is free behind ``directory``, for files that this process can make there.

    Raises:
        ValueError: it cannot; says what to change.
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
