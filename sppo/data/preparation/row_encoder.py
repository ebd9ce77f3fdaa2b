"""Rows and files to tokens: documents, their text, their ids, and what becomes of each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sppo.data.chat.conversation import Chat
from sppo.data.chat.marked_text import MarkedText
from sppo.data.chat.template import ChatTemplate, TrainOn
from sppo.data.preparation.columns import IdsDocument, RowFormat, require_text
from sppo.data.preparation.ids_files import IdsTokenizer
from sppo.data.preparation.rows import Row
from sppo.data.preparation.tokenizer_file import FileTokenizer
from sppo.data.preparation.tokenizers import (
    ByteTokenizer,
    EncodedShard,
    EncodedText,
    LeftOut,
)

Tokenizer = ByteTokenizer | IdsTokenizer | FileTokenizer

_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """Encoder of rows into tokens; a document gives the same tokens whatever stands around it."""

    tokenizer: Tokenizer
    format: RowFormat
    _: KW_ONLY
    template: ChatTemplate | None = None
    """Template of conversations; None if rows are none."""
    train_on: TrainOn | None = None
    """Part of a document that is trained on; None if ready-made ids tell it."""
    held_out: float = 0.0
    """Share of documents that are held out."""
    longest: int | None = None
    """Most tokens of a document, without its first; None for any number."""
    drops_longer: bool = True
    """Whether longer documents are left out; otherwise one is an error."""

    def encode(self, rows: Sequence[Row]) -> list[EncodedShard]:
        """Return the ids of rows, one shard for each, in order.

        Texts are tokenized whole, because cuts would change their ids.

        Raises:
            ValueError: A row is no document of the format; names it.
        """
        documents = [self._document(row) for row in rows]
        texts = [document for document in documents if isinstance(document, MarkedText)]
        encoded: Iterator[EncodedText] = iter(())
        if texts:
            assert not isinstance(self.tokenizer, IdsTokenizer), "its rows are ids"
            encoded = iter(self.tokenizer.encode_texts(texts))
        shards = []
        for row, document in zip(rows, documents, strict=True):
            if isinstance(document, MarkedText):
                (ids, counts), content = next(encoded), document.text.encode()
            else:
                ids, counts = self._ids_in_vocabulary(document, row), document.counts
                content = _ids_bytes(ids)
            shards.append(
                EncodedShard(
                    ids,
                    True,
                    row.source_bytes,
                    counts,
                    source=row.source,
                    held_out=self._is_held_out(_digest(content)),
                    left_out=self._left_out(len(ids), counts, row.source),
                )
            )
        return shards

    def encode_file(self, path: Path) -> Iterator[EncodedShard]:
        """Yield the ids of a file that is one document, in parts, so that it may be of any size."""
        assert not isinstance(self.tokenizer, FileTokenizer), "its files are rows"
        held_out, left_out = False, None
        if self.held_out or self.longest is not None:
            digest, length = _digest(), 0
            for shard in self.tokenizer.encode_file(path):
                is_text = isinstance(self.tokenizer, ByteTokenizer)
                digest.update(shard.ids.tobytes() if is_text else _ids_bytes(shard.ids))
                length += len(shard.ids)
            held_out = self._is_held_out(digest)
            left_out = self._left_out(length, None, str(path))
        for shard in self.tokenizer.encode_file(path):
            yield replace(shard, held_out=held_out, left_out=left_out, source=str(path))

    def described(self) -> dict[str, Any]:
        """Return the fields of :class:`.tokens.TokenMeta` that tell how documents are made."""
        template, by_turns = self.template, self.train_on in ("assistant", "last")
        return {
            "format": self.format.name,
            "train_on": self.train_on,
            "mask_method": template.method if template is not None and by_turns else None,
            "chat_template_sha256": None if template is None else template.sha256,
            "special_ids": self._special_ids(),
        }

    def _special_ids(self) -> dict[str, int] | None:
        if self.template is None or not isinstance(self.tokenizer, FileTokenizer):
            return None
        tokens = self.template.special_tokens.items()
        ids = {name: self.tokenizer.backend.token_to_id(token) for name, token in tokens}
        return {name: number for name, number in ids.items() if number is not None}

    def _document(self, row: Row) -> MarkedText | IdsDocument:
        document = self.format.document(row)
        if isinstance(document, Chat):
            assert self.template is not None, "rows of chats have a template"
            assert self.train_on is not None
            document = self.template.marked(document, train_on=self.train_on, source=row.source)
        if isinstance(document, IdsDocument):
            return document
        require_text(document.text, row.source)
        return replace(document, trained=None) if self.train_on == "all" else document

    def _ids_in_vocabulary(self, document: IdsDocument, row: Row) -> NDArray[Any]:
        ids, size = document.ids, self.tokenizer.vocab_size
        wrong = (ids < 0) | (ids >= size)
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(
                f"{row.source}: id {ids[place]} at position {place}, but ids are from 0 to"
                f" {size - 1} in the vocabulary of {size}; give the tokenizer that made them, or"
                " another --vocab-size"
            )
        return ids

    def _is_held_out(self, digest: Any) -> bool:
        """Return whether a document is held out, which depends on its contents alone.

        Args:
            digest: Digest of its text or ids, of :data:`_HASH_BYTES` bytes.
        """
        return int.from_bytes(digest.digest(), "big") < self.held_out * (1 << 8 * _HASH_BYTES)

    def _left_out(
        self, num_ids: int, counts: NDArray[np.bool_] | None, source: str
    ) -> LeftOut | None:
        """Return why a document is left out, if it is.

        Raises:
            ValueError: It is longer than any may be.
        """
        end = self.tokenizer.description.end_of_document
        num_labels = num_ids - (end is None)
        if self.longest is not None and num_labels > self.longest:
            if not self.drops_longer:
                raise ValueError(
                    f"{source}: {num_labels:,} tokens to train on, more than --longer-than"
                    f" {self.longest}=refuse; remove the row, or write drop"
                )
            return "longer"
        if counts is None or num_ids == 0:
            return None
        # The first token is no label; the end counts if the last token does.
        trained = counts[1:].any() or (end is not None and counts[-1])
        return None if trained else "untrained"


def _digest(content: bytes = b"") -> Any:
    return hashlib.blake2b(content, digest_size=_HASH_BYTES)


def _ids_bytes(ids: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(ids, dtype="<i8").tobytes()
