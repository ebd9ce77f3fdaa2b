"""The directory that a run names for its disk tier, looked at before anything is done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sppo.offload.disk_room import DiskRoom, disk_room


def usable_directory(directory: Path) -> DiskRoom:
    """What is free behind ``directory``, for files that this process can make there.

    Raises:
        ValueError: it cannot; says what to change.
    """
    what = f"activations.disk={directory}"
    if not directory.exists():
        raise ValueError(
            f"{what}: no such directory; make it, on a fast local disk, or leave the key out to "
            "move nothing"
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
