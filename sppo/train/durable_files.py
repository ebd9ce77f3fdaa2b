"""Files that are either whole or absent, also after the machine loses power."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``; a reader sees the old content or the new, never a mixture.

    Raises:
        OSError: the disk is full, or another fault of it; ``path`` is then as it was.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON.

    Raises:
        ValueError: a float that JSON has no word for (NaN or infinity).
        OSError: as :func:`write_text`.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable: fsync of a file does not cover its name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
