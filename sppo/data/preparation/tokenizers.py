"""Tokenizers, which convert documents to ids: the protocol, and built-in ``bytes`` and ``ids``.

Every tokenizer yields :class:`EncodedShard`. The built-in tokenizers yield a document in parts, so
it may be larger than memory. Text of a tokenizer file is tokenized one document at a time, because
cuts would change the ids (:mod:`sppo.data.preparation.tokenizer_file`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sppo.data.array_file import map_array
from sppo.data.preparation.documents import read_bytes, reading
from sppo.data.preparation.mask_files import map_loss_mask
from sppo.data.tokens import MAX_VOCAB_SIZE, TokenizerDescription
from sppo.quoting import one_line

EndOfDocument = int | Literal["auto", "none"]
"""Id appended to every document; ``auto`` for the tokenizer's own; ``none`` to append none."""

BYTE_END_OF_DOCUMENT = 256
BYTE_VOCAB_SIZE = 257

_BLOCK_BYTES = 4 << 20
_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class EncodedShard:
    """Ids of one document, or of the next part of one."""

    ids: NDArray[Any]
    """[n] Integers of any width; n may be 0."""
    ends_document: bool
    source_bytes: int
    """Bytes of input of these ids, for progress."""
    counts: NDArray[np.bool_] | None = None
    """[n] Whether predicting each id counts in the loss; None if all count."""


class Tokenizer(Protocol):
    """Interface of a tokenizer, as :func:`sppo.data.preparation.prepare.prepare_tokens` uses it."""

    @property
    def description(self) -> TokenizerDescription:
        """Description of the tokenizer, recorded in ``meta.json``."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; every id is below."""

    def encode(self, paths: Sequence[Path]) -> Iterator[EncodedShard]:
        """Yield the ids of all documents in the files, in order, without the end-of-document id."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Tokenizer whose ids 0..255 are bytes, and by default 256 ends a document."""

    end_of_document: int | None = BYTE_END_OF_DOCUMENT

    @property
    def vocab_size(self) -> int:
        """The size 257, also without an end-of-document id: models for bytes have 257 rows."""
        return BYTE_VOCAB_SIZE

    @property
    def description(self) -> TokenizerDescription:
        """Description of the tokenizer, recorded in ``meta.json``."""
        return TokenizerDescription(name="bytes", end_of_document=self.end_of_document)

    def encode(self, paths: Sequence[Path]) -> Iterator[EncodedShard]:
        """Yield the bytes of files, and the text of ``.jsonl`` lines as UTF-8."""
        for block in read_bytes(paths, block_bytes=_BLOCK_BYTES):
            ids = np.frombuffer(block.data, dtype=np.uint8)
            yield EncodedShard(ids, block.ends_document, block.source_bytes)


@dataclass(frozen=True, slots=True)
class IdsTokenizer:
    """Tokenizer for ready-made ids in 1-D integer ``.npy`` files, one document each.

    The loss mask of ``NAME.npy`` is ``NAME.mask.npy``, if that file exists.
    """

    vocab_size: int
    _: KW_ONLY
    end_of_document: int | None = None

    @property
    def description(self) -> TokenizerDescription:
        """Description of the tokenizer, recorded in ``meta.json``."""
        return TokenizerDescription(name="ids", end_of_document=self.end_of_document)

    def encode(self, paths: Sequence[Path]) -> Iterator[EncodedShard]:
        """Yield the arrays in the files, one block at a time."""
        for path in paths:
            ids = _map_ids(path)
            mask = map_loss_mask(path, num_ids=len(ids))
            source_bytes = path.stat().st_size
            with reading(path):
                for start in range(0, len(ids), _BLOCK_TOKENS):
                    block = np.asarray(ids[start : start + _BLOCK_TOKENS])
                    counts = None if mask is None else mask[start : start + _BLOCK_TOKENS]
                    yield EncodedShard(block, False, block.nbytes, counts)
                    source_bytes -= block.nbytes
            yield EncodedShard(ids[:0], True, source_bytes)


def scan_ids(
    paths: Sequence[Path], *, vocab_size: int | None, end_of_document: int | None
) -> IdsTokenizer:
    """Check every id in the files, and their loss masks; return a tokenizer with their vocabulary.

    Args:
        paths: Paths of ``.npy`` files of ids.
        vocab_size: Size of the vocabulary; None for the largest id + 1.
        end_of_document: Id appended to every document, or None.

    Raises:
        ValueError: An array is not 1-D integers, an id is below 0 or not below the vocabulary
            size, or a mask does not have one bool per id.
    """
    limit = MAX_VOCAB_SIZE if vocab_size is None else vocab_size
    if not 1 <= limit <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"--vocab-size {limit}: a vocabulary has between 1 and {MAX_VOCAB_SIZE} ids"
        )
    largest = -1
    for path in paths:
        largest = max(largest, _check_ids(path, limit=limit, given=vocab_size is not None))
    if end_of_document is not None:
        largest = max(largest, check_end_of_document(end_of_document, vocab_size=limit))
    return IdsTokenizer(
        largest + 1 if vocab_size is None else vocab_size, end_of_document=end_of_document
    )


def check_end_of_document(end_of_document: int, *, vocab_size: int) -> int:
    """Return ``end_of_document`` if it is an id of the vocabulary.

    Raises:
        ValueError: The id is below 0, or not below ``vocab_size``.
    """
    if not 0 <= end_of_document < vocab_size:
        raise ValueError(
            f"--end-of-document {end_of_document}: an id is between 0 and {vocab_size - 1} in a"
            f" vocabulary of {vocab_size}; give one of those, or none"
        )
    return end_of_document


def _map_ids(path: Path) -> NDArray[Any]:
    """Memory-map the ids in ``path``, int [n]."""
    fix = "--tokenizer ids reads .npy files of whole numbers with one axis, one document each"
    with reading(path):
        try:
            ids = map_array(path)
        except ValueError as error:
            raise ValueError(f"{error}; {fix}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path}: {one_line(ids.dtype)} of shape {list(ids.shape)}; {fix}")
    return ids


def _check_ids(path: Path, *, limit: int, given: bool) -> int:
    """Check all ids in ``path``, and return the largest, or -1 if there are none."""
    ids = _map_ids(path)
    map_loss_mask(path, num_ids=len(ids))
    largest = -1
    for start in range(0, len(ids), _BLOCK_TOKENS):
        block = ids[start : start + _BLOCK_TOKENS]
        low, high = int(block.min()), int(block.max())
        if low < 0:
            where = start + int(np.argmax(block < 0))
            raise ValueError(
                f"{path}: id {int(ids[where])} at position {where}; ids are at least 0."
                " Replace padding and ignored positions before writing the file"
            )
        if high >= limit:
            where = start + int(np.argmax(block >= limit))
            fix = f"set --vocab-size to at least {high + 1}" if given else "ids have 32 bits"
            raise ValueError(
                f"{path}: id {int(ids[where])} at position {where}, but the vocabulary has"
                f" {limit} ids (0 to {limit - 1}); {fix}"
            )
        largest = max(largest, high)
    return largest
