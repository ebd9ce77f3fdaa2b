"""Opening of input files, compressed ones included, with errors that users can correct."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sppo.quoting import one_line

_COMPRESSED = (".gz", ".zst")


def content_suffix(path: Path) -> str:
    """Return the suffix of the contents, such as ``.jsonl`` of ``x.jsonl.gz``."""
    return Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert an error of reading in the context into a ValueError with a message for the user.

    Args:
        path: Path that is read, for the message.

    Raises:
        ValueError: A system call failed in the context, or a file is damaged.
    """
    try:
        yield
    except reading_errors() as error:
        refuse_unreadable(str(path), error)


def reading_errors() -> tuple[type[BaseException], ...]:
    """Return the errors of the system and of damaged files, those of pyarrow if it is in use."""
    arrow = sys.modules.get("pyarrow")
    errors = () if arrow is None else (arrow.ArrowException,)
    return (OSError, EOFError, zlib.error, *errors)


def refuse_unreadable(where: str, error: BaseException) -> NoReturn:
    """Raise the ValueError of a file that cannot be read.

    Args:
        where: Path, and as far as it is known, the place in the file.
        error: One of :func:`reading_errors`.
    """
    reason = getattr(error, "strerror", None) or one_line(error)
    raise ValueError(f"{where}: cannot be read: {reason}; leave it out or fix it") from None


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file for reading, decompressed if its name ends in ``.gz`` or ``.zst``.

    Yields:
        (contents; the file itself, whose position tells how much of it has been read).

    Raises:
        ValueError: pyarrow is needed, and not installed.
        OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file) as contents:
                yield contents, file  # type: ignore[misc]
        elif path.suffix == ".zst":
            arrow = pyarrow_for(path)
            stream = arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), "zstd")
            with io.BufferedReader(stream) as contents:
                yield contents, file
        else:
            yield file, file


def pyarrow_for(path: Path) -> Any:
    """Return the module :mod:`pyarrow`, which reads a file.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise ValueError(
            f"{path}: {path.suffix} files need pyarrow, which is not installed;"
            " run `pip install 'sppo[data]'`, or leave them out"
        ) from None
    return pyarrow
