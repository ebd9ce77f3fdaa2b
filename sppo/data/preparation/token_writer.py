"""Writing of a token directory: into a hidden sibling, which is then renamed into place."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sppo.data.tokens import (
    DOCUMENTS_FILE,
    FORMAT_VERSION,
    FURTHER_FILES,
    LOSS_MASK_FILE,
    META_FILE,
    TOKEN_DATA_FILES,
    TOKENS_FILE,
    TokenizerDescription,
    TokenMeta,
    dtype_name,
)
from sppo.output_file import FULL_ERRNOS, write_json

_BUFFER_BYTES = 1 << 20


class TokenWriter:
    """Writer of token data that appends ids to ``tokens.bin`` and records document starts.

    ``loss_mask.bin`` is created with the first tokens that have a mask. Memory is a buffer per file
    and 8 bytes per document, whatever the number of tokens. Use as a context manager;
    :meth:`finish` writes the document starts and ``meta.json``.
    """

    def __init__(
        self, directory: Path, *, vocab_size: int, description: TokenizerDescription
    ) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._description = description
        self._dtype = np.dtype(dtype_name(vocab_size)).newbyteorder("<")
        self._tokens = _SummedFile(directory / TOKENS_FILE)
        self._mask: _SummedFile | None = None
        self._last_counts = True
        self._offsets = array("q", [0])
        self._max_id = 0
        self.num_tokens = 0
        """Number of tokens written so far."""
        self.num_empty = 0
        """Number of documents left out because they were empty."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens, self._mask):
            if file is not None:
                file.close()

    def append(self, ids: NDArray[Any], counts: NDArray[np.bool_] | None = None) -> None:
        """Append ids to the current document.

        Args:
            ids: [n] Integers of any width.
            counts: [n] Whether predicting each id counts in the loss; None if all count.

        Raises:
            ValueError: An id is outside the vocabulary, e.g. because a file changed while it was
                read.
            OSError: The disk is full, or failed.
        """
        if len(ids) == 0:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            raise ValueError(
                f"id {low if low < 0 else high} is outside the vocabulary of {self._vocab_size};"
                " an input file changed while it was read; run the command again"
            )
        if counts is not None and self._mask is None:
            self._mask = _SummedFile(self._directory / LOSS_MASK_FILE)
            self._append_counting(self.num_tokens)
        self._tokens.append(np.ascontiguousarray(ids, dtype=self._dtype))
        if counts is None:
            self._append_counting(len(ids))
        elif self._mask is not None:
            self._mask.append(np.ascontiguousarray(counts).view(np.uint8))
        self._last_counts = counts is None or bool(counts[-1])
        self.num_tokens += len(ids)
        self._max_id = max(self._max_id, high)

    def _append_counting(self, num_tokens: int) -> None:
        """Append tokens that all count to the loss mask, if there is one."""
        if self._mask is None:
            return
        for start in range(0, num_tokens, _BUFFER_BYTES):
            self._mask.append(np.ones(min(_BUFFER_BYTES, num_tokens - start), dtype=np.uint8))

    def end_document(self) -> None:
        """End the current document, and append its end id; an empty document is left out.

        Predicting the end id counts in the loss if predicting the token before does.
        """
        if self.num_tokens == self._offsets[-1]:
            self.num_empty += 1
            return
        if self._description.end_of_document is not None:
            end = np.array([self._description.end_of_document])
            self.append(end, None if self._last_counts else np.array([False]))
        self._offsets.append(self.num_tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents written so far."""
        return len(self._offsets) - 1

    def finish(self, **described: Any) -> None:
        """Write ``documents.npy`` and ``meta.json``, and flush all files to the disk.

        Args:
            **described: Fields of :class:`TokenMeta` that tell how the documents were made.

        Raises:
            OSError: The disk is full, or failed.
        """
        assert self._offsets[-1] == self.num_tokens, "finish() inside a document"
        starts = np.frombuffer(self._offsets, dtype=np.int64)
        with (self._directory / DOCUMENTS_FILE).open("wb") as file:
            np.save(file, starts)
            _flush_to_disk(file)
        meta = TokenMeta(
            format_version=FORMAT_VERSION,
            dtype=dtype_name(self._vocab_size),
            vocab_size=self._vocab_size,
            max_id=self._max_id,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            tokens_sha256=self._tokens.finish(),
            tokenizer=self._description,
            documents_sha256=hashlib.sha256(starts.data).hexdigest(),
            loss_mask_sha256=None if self._mask is None else self._mask.finish(),
            **described,
        )
        write_json(self._directory / META_FILE, asdict(meta))


class _SummedFile:
    """File that arrays are appended to, with its checksum."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._digest = hashlib.sha256()
        self.close = self._file.close

    def append(self, block: NDArray[Any]) -> None:
        """Append a contiguous array, [n]."""
        self._digest.update(block.data)
        self._file.write(block.data)

    def finish(self) -> str:
        """Flush the file to the disk, and return its SHA-256."""
        _flush_to_disk(self._file)
        return self._digest.hexdigest()


def _flush_to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def check_destination(out: Path, *, force: bool) -> None:
    """Raise ValueError if ``out`` exists and cannot be replaced by token data.

    Args:
        out: Directory to write.
        force: Accept a partial token directory, which will be replaced; a directory with other
            files is never replaced.

    Raises:
        ValueError: ``out`` is a file, holds files other than token data, or holds part of token
            data without ``force``.
    """
    try:
        names = {path.name for path in out.iterdir()}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ValueError(
            f"--out {out}: this or a parent of it is a file; give a new name"
        ) from None
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be read: {error.strerror}") from None
    # Further files alone may be a tokenizer's, in a directory of the user.
    known = TOKEN_DATA_FILES | FURTHER_FILES if names & TOKEN_DATA_FILES else frozenset()
    foreign = sorted(names - known)
    if foreign:
        raise ValueError(
            f"--out {out}: the directory holds {', '.join(foreign[:3])}, which is not token data"
            " and is never replaced; give a new name"
        )
    if names and not names >= TOKEN_DATA_FILES and not force:
        raise ValueError(
            f"--out {out}: holds part of token data ({', '.join(sorted(names))}); replace it with"
            " --force, or give a new name"
        )


@contextmanager
def temporary_sibling(out: Path) -> Iterator[Path]:
    """Yield a new hidden directory beside ``out``, and remove it at the end if it still exists.

    It is on the same file system, so that a rename can move it to ``out``. If the body fails,
    parent directories that were created for it are removed, too.

    Raises:
        ValueError: The directory cannot be created.
        OSError: The disk is full; the error names a file or ``out``.
    """
    missing_parents = [parent for parent in out.parents if not parent.exists()]
    temporary = out.parent / f".{out.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
        except OSError as error:
            if error.errno in FULL_ERRNOS:
                raise
            raise ValueError(
                f"--out {out}: cannot be written: {error.strerror}; give a directory you may"
                " write to"
            ) from None
        yield temporary
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # as of writing to an open file
            error.filename = str(out)
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in missing_parents:
            with suppress(OSError):  # not empty, or never made
                parent.rmdir()
        raise
    shutil.rmtree(temporary, ignore_errors=True)


def move_into_place(temporary: Path, out: Path, *, replace: bool) -> None:
    """Rename ``temporary`` to ``out``.

    Args:
        temporary: Directory to rename.
        out: Its new path.
        replace: Delete the token data that ``out`` held before.

    Raises:
        ValueError: The rename failed, e.g. because another process wrote ``out`` meanwhile.
        OSError: The disk is full.
    """
    replaced = out.parent / f".{out.name}.replaced-{uuid.uuid4().hex[:8]}"
    try:
        if replace and out.exists():
            out.rename(replaced)
        temporary.rename(out)
    except OSError as error:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        if error.errno in FULL_ERRNOS:
            raise
        raise ValueError(
            f"--out {out}: cannot be moved into place: {error.strerror}; run the command again"
        ) from None
    # Processes that have mapped the old files can read them until they close.
    shutil.rmtree(replaced, ignore_errors=True)
