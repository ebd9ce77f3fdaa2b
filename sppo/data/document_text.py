"""Documents of token data as text, with what of it is trained on, for ``sppo data show``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sppo.data.preparation.tokenizer_file import TOKENIZER_FILE, load_tokenizer_file
from sppo.data.tokens import TokenData
from sppo.quoting import one_line
from sppo.units import counted

_BYTES = 256

Decode = Callable[[list[int]], str]
"""Function that returns the text of ids."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens one after another that are all trained on, or all not."""

    trained: bool
    text: str


@dataclass(frozen=True, slots=True)
class DocumentText:
    """One document of token data."""

    document: int
    """Number of the document, from 0."""
    num_documents: int
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    """For each id, whether predicting it counts in the loss."""
    pieces: tuple[Piece, ...]
    """The text; of ready-made ids, their numbers."""
    train_on: str | None
    """The part that was asked for; None if the data tell none."""
    mask_method: str | None
    """How the chat template told the text of the assistant; None for other documents."""


def document_text(data: TokenData, number: int) -> DocumentText:
    """Return a document as text.

    Args:
        data: Open token data.
        number: Number of the document, from 0.

    Raises:
        ValueError: There is no such document, the tokenizer is missing or another one, or a file
            is damaged.
    """
    if not 0 <= number < data.num_documents:
        raise ValueError(
            f"{data.directory}: no document {number}; there are"
            f" {counted(data.num_documents, 'document')}, numbered from 0"
        )
    low, high = (int(data.document_offsets[at]) for at in (number, number + 1))
    ids, trained = data.ids(low, high), data.counts(low, high)
    return DocumentText(
        document=number,
        num_documents=data.num_documents,
        ids=tuple(ids.tolist()),
        trained=tuple(trained.tolist()),
        pieces=tuple(_pieces(ids, trained, _decoder(data))),
        train_on=data.meta.train_on,
        mask_method=data.meta.mask_method,
    )


def _pieces(ids: NDArray[np.int64], trained: NDArray[np.bool_], decode: Decode) -> Iterator[Piece]:
    """Yield the text of ids, cut where it begins and ends to be trained on."""
    cuts = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        # Some decoders write no space before the first token, so that one before goes along.
        before = decode(ids[max(0, start - 1) : start].tolist())
        text = decode(ids[max(0, start - 1) : end].tolist())
        yield Piece(bool(trained[start]), text.removeprefix(before))


def _decoder(data: TokenData) -> Decode:
    """Return the function that returns the text of ids of token data."""
    tokenizer = data.meta.tokenizer
    if tokenizer.name == "ids":
        return lambda ids: "".join(f"{number} " for number in ids)
    if tokenizer.name == "bytes":
        return _text_of_bytes
    kept, original = data.directory / TOKENIZER_FILE, Path(tokenizer.name)
    places = (kept, original / TOKENIZER_FILE, original)
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise ValueError(
            f"{one_line(original)}: the tokenizer that made the tokens is not there any more; copy"
            f" it to {kept}"
        )
    loaded = load_tokenizer_file(str(path), end_of_document="none")
    if loaded.description.sha256 != tokenizer.sha256:
        raise ValueError(
            f"{path}: not the tokenizer that made these tokens ({one_line(tokenizer.name)});"
            " prepare them again with --force"
        )
    return lambda ids: str(loaded.backend.decode(ids, skip_special_tokens=False))


def _text_of_bytes(ids: list[int]) -> str:
    """Return the text of bytes; other ids are written as their numbers."""
    parts = [bytes([number]) if number < _BYTES else b"<%d>" % number for number in ids]
    return b"".join(parts).decode("utf-8", errors="replace")
