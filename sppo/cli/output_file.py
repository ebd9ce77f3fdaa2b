"""Files that a command is asked to write."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(option: str, path: Path) -> None:
    """Find out before any work whether `path` can be written; touches nothing.

    Raises:
        ValueError: it cannot, and why.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: the directory {path.parent} cannot be written to")
