"""Tokenizers: from documents to ids, by the built-in ``bytes`` and ``ids`` or a tokenizer file.

Every tokenizer yields :class:`EncodedShard`, so a document larger than memory passes through in
parts where that does not change its ids (bytes and ids; text is tokenized a document at a time).
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
"""Id appended to every document; ``auto``: the tokenizer's own; ``none``: nothing is."""

BYTE_END_OF_DOCUMENT = 256
BYTE_VOCAB_SIZE = 257

_BLOCK_BYTES = 4 << 20
_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class EncodedShard:
    """Ids of one document or of the next part of it."""

    ids: NDArray[Any]
    """[n] integers of any width, n may be 0."""
    ends_document: bool
    source_bytes: int
    """Bytes of input these ids come from, for progress."""
    counts: NDArray[np.bool_] | None = None
    """[n] whether predicting each id counts in the loss; None where all do."""


class Tokenizer(Protocol):
    """Interface of a tokenizer, as :func:`sppo.data.preparation.prepare.prepare_tokens` uses it."""

    @property
    def description(self) -> TokenizerDescription:
        """Recorded in ``meta.json``."""

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""

    def encode(self, paths: Sequence[Path]) -> Iterator[EncodedShard]:
        """Ids of all documents in the files, in order, without the end-of-document id."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Ids 0..255 are bytes; 256 ends a document."""

    end_of_document: int | None = BYTE_END_OF_DOCUMENT

    @property
    def vocab_size(self) -> int:
        """Return 257, also when nothing ends a document: models made for bytes have 257 rows."""
        return BYTE_VOCAB_SIZE

    @property
    def description(self) -> TokenizerDescription:
        """Recorded in ``meta.json``."""
        return TokenizerDescription(name="bytes", end_of_document=self.end_of_document)

    def encode(self, paths: Sequence[Path]) -> Iterator[EncodedShard]:
        """Bytes of files as they are; the text of ``.jsonl`` lines as UTF-8."""
        for block in read_bytes(paths, block_bytes=_BLOCK_BYTES):
            ids = np.frombuffer(block.data, dtype=np.uint8)
            yield EncodedShard(ids, block.ends_document, block.source_bytes)


@dataclass(frozen=True, slots=True)
class IdsTokenizer:
    """Ids made elsewhere: 1-D integer ``.npy`` files, one document each, taken as they are.

    The loss mask of ``NAME.npy`` is ``NAME.mask.npy``, where there is one.
    """

    vocab_size: int
    _: KW_ONLY
    end_of_document: int | None = None

    @property
    def description(self) -> TokenizerDescription:
        """Recorded in ``meta.json``."""
        return TokenizerDescription(name="ids", end_of_document=self.end_of_document)

    def encode(self, paths: Sequence[Path]) -> Iterator[EncodedShard]:
        """The arrays in the files, a block at a time."""
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
    """Check every id in the files, and their loss masks, and find the vocabulary they need.

    Args:
        paths: ``.npy`` files.
        vocab_size: Size the ids must stay below; None takes the largest id + 1.
        end_of_document: Id appended to every document, or None.

    Raises:
        ValueError: not 1-D integers, an id below 0 or not below the vocabulary size, or a mask
            that is not one bool for each id.
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
    """The id itself, if it is one of the vocabulary.

    Raises:
        ValueError: below 0, or not below ``vocab_size``.
    """
    if not 0 <= end_of_document < vocab_size:
        raise ValueError(
            f"--end-of-document {end_of_document}: an id is between 0 and {vocab_size - 1} in a"
            f" vocabulary of {vocab_size}; give one of those, or none"
        )
    return end_of_document


def _map_ids(path: Path) -> NDArray[Any]:
    """The array in ``path``, mapped."""
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
    """Largest id in ``path``, -1 when it holds none."""
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
