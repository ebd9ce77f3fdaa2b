"""Ids of documents as they are written, and the tokenizer of ``bytes``.

Documents become :class:`EncodedShard`, without the ids that end documents. Files of bytes and of
ready-made ids are yielded in parts, so that a document may be larger than memory. Text of a
tokenizer file is tokenized one document at a time, because cuts would change the ids
(:mod:`sppo.data.preparation.tokenizer_file`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sppo.data.chat.marked_text import MarkedText
from sppo.data.preparation.opening import opened, reading
from sppo.data.tokens import TokenizerDescription

EndOfDocument = int | Literal["auto", "none"]
"""Id appended to every document; ``auto`` for the tokenizer's own; ``none`` to append none."""

BYTE_END_OF_DOCUMENT = 256
BYTE_VOCAB_SIZE = 257

EncodedText = tuple[NDArray[Any], NDArray[np.bool_] | None]
"""Ids of a text, and for each whether predicting it counts in the loss; None if all count."""

LeftOut = Literal["untrained", "longer"]
"""Why a document is left out: nothing of it is trained on, or it is longer than asked for."""

_BLOCK_BYTES = 4 << 20


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
    _: KW_ONLY
    source: str = ""
    """File, and row if it holds rows, for messages."""
    held_out: bool = False
    """Whether the document goes to the held-out data."""
    left_out: LeftOut | None = None
    """Why the document is not written; None if it is."""


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

    def encode_file(self, path: Path) -> Iterator[EncodedShard]:
        """Yield the bytes of a file in blocks."""
        done_bytes = 0
        with reading(path), opened(path) as (contents, file):
            while data := contents.read(_BLOCK_BYTES):
                before, done_bytes = done_bytes, file.tell()
                yield EncodedShard(_bytes(data), False, done_bytes - before)
        yield EncodedShard(_bytes(b""), True, 0)

    def encode_texts(self, texts: Sequence[MarkedText]) -> list[EncodedText]:
        """Return the ids of texts, with what of them counts in the loss."""
        return [_encode_text(text) for text in texts]


def _encode_text(text: MarkedText) -> EncodedText:
    ids = _bytes(text.text.encode())
    if text.trained is None:
        return ids, None
    # The index of the character of each byte, which the first of its bytes increases.
    character = np.cumsum((ids & 0xC0) != 0x80) - 1
    return ids, text.counting(np.stack([character, character + 1], axis=1))


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def end_id(asked: EndOfDocument, *, own: int | None, vocab_size: int) -> int | None:
    """Return the id that ends a document; None if nothing does.

    Args:
        asked: Id that was asked for.
        own: Id that the tokenizer has for it, for ``auto``.
        vocab_size: Size of the vocabulary.

    Raises:
        ValueError: The id is below 0, or not below ``vocab_size``.
    """
    if isinstance(asked, str):
        return own if asked == "auto" else None
    if not 0 <= asked < vocab_size:
        raise ValueError(
            f"--end-of-document {asked}: an id is between 0 and {vocab_size - 1} in a vocabulary of"
            f" {vocab_size}; give one of those, or none"
        )
    return asked
