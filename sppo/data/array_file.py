"""Arrays in files: mapped, so that opening one costs no memory whatever its size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sppo.quoting import one_line


def map_array(path: Path) -> NDArray[Any]:
    """Map the array in `path`; any number of axes, any type but Python objects.

    Raises:
        ValueError: no ``.npy`` file, or one that is damaged or cut off.
        OSError: it cannot be read.
    """
    try:
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    # A header is Python text that numpy evaluates: a damaged one raises whatever Python does,
    # TokenError and SyntaxError, MemoryError and OverflowError among them.
    except Exception as error:
        reason = one_line(error) or type(error).__name__
        raise ValueError(f"{one_line(path)}: not a .npy array ({reason})") from None
    return array


def require_whole(array: NDArray[Any]) -> None:
    """Raise ValueError if the file behind a mapped array has become shorter than the array.

    To be called before a mapped array is read: the system kills a process that reads beyond the
    end of a file, without a word. A file that was deleted or replaced stays readable.
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
