"""Memory-mapped array files, which take no memory to open, whatever their size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sppo.quoting import one_line


def map_array(path: Path) -> NDArray[Any]:
    """Memory-map the array in `path`, of any shape and any type but Python objects.

    Raises:
        ValueError: The file is not a ``.npy`` file, or is damaged, truncated or too long.
        OSError: The file cannot be read.
    """
    try:
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    # A header is Python text that numpy evaluates: a damaged header may raise any error of Python,
    # such as TokenError, SyntaxError, MemoryError and OverflowError.
    except Exception as error:
        reason = one_line(error) or type(error).__name__
        raise ValueError(f"{one_line(path)}: not a .npy array ({reason})") from None
    behind = path.stat().st_size - array.offset - array.nbytes  # type: ignore[attr-defined]
    if behind:
        raise ValueError(
            f"{one_line(path)}: damaged: {behind} bytes follow the array; copy it again"
        )
    return array


def require_whole(array: NDArray[Any]) -> None:
    """Raise ValueError if the file of a memory-mapped array has become shorter than the array.

    Must be called before the array is read: the system kills a process that reads a mapping beyond
    the end of its file, without a message. A file that was deleted or replaced stays readable.
    """
    if not isinstance(array, np.memmap) or array.filename is None:
        return
    needed = array.offset + array.nbytes
    try:
        there = os.stat(array.filename).st_size
    except FileNotFoundError:
        return
    if there < needed:
        raise ValueError(
            f"{one_line(array.filename)}: {there} bytes, and there were {needed} when it was opened"
            ": the file was cut while it was in use; put it back, and the same command goes on"
        )
