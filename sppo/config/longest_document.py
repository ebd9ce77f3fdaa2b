"""Length of the longest document of token data, for ``sequence.length: longest``."""

from __future__ import annotations

from pathlib import Path

DOCUMENTS_FILE = "documents.npy"
"""File of token data with the start of every document, then the number of tokens."""


def longest_document(directory: Path) -> int:
    """Return the tokens to train on of the longest document: all of its tokens but one.

    Only the starts of documents are read; all else is checked before the run.

    Raises:
        ValueError: The starts are missing or damaged.
        OSError: They cannot be read.
    """
    import numpy as np

    from sppo.array_file import map_array

    file = directory / DOCUMENTS_FILE
    if not file.is_file():
        raise ValueError(f"{file}: no such file; token data is written by sppo data prepare")
    starts = map_array(file)
    if starts.ndim != 1 or len(starts) < 2 or starts.dtype != np.int64:
        raise ValueError(f"{file}: not the starts of documents; prepare the data again")
    return int(np.diff(starts).max()) - 1
