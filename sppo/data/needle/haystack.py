"""Haystack: the text in which needles are hidden, as tokens with the ends of its sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sppo.data.preparation.documents import read_text
from sppo.data.preparation.tokenizer_file import FileTokenizer
from sppo.data.preparation.tokenizers import ByteTokenizer

TextTokenizer = ByteTokenizer | FileTokenizer

_SENTENCE_END = re.compile(r"[.!?](?=\s)|\n")
_SNAPS = 0.02
"""A needle is moved to the end of a sentence within this share of the haystack."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Tokens of a text, with their places."""

    ids: NDArray[np.int64]
    """[n] Ids of the text, without special tokens that it does not contain."""
    ends: NDArray[np.int64]
    """[n] Position after the last character of each token; within a character, after it."""


def encode_text(tokenizer: TextTokenizer, text: str) -> EncodedText:
    """Return the tokens of a text, tokenized whole."""
    if isinstance(tokenizer, ByteTokenizer):
        data = np.frombuffer(text.encode(), dtype=np.uint8)
        begins_character = (data & 0xC0) != 0x80
        return EncodedText(data.astype(np.int64), np.cumsum(begins_character, dtype=np.int64))
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
    return EncodedText(np.array(encoding.ids, dtype=np.int64), ends)


@dataclass(frozen=True, slots=True, eq=False)
class Haystack:
    """Tokens of a long text."""

    ids: NDArray[np.int64]
    """[n] Ids of the text."""
    after_sentences: NDArray[np.int64]
    """Ascending positions in `ids` after which a sentence or a line has just ended; the first is 0.
    """

    def cut(self, length: int, *, start: float) -> Haystack:
        """Return `length` tokens that begin with a sentence.

        Args:
            length: Number of tokens, at most all.
            start: Where to begin, as a fraction of the sentences that have enough tokens behind
                them; below 1.
        """
        choices = int(np.searchsorted(self.after_sentences, len(self.ids) - length, "right"))
        first = int(self.after_sentences[int(start * choices)])
        inside = self.after_sentences[np.searchsorted(self.after_sentences, first) :] - first
        return Haystack(self.ids[first : first + length], inside[inside <= length])

    def place(self, share: float) -> int:
        """Return the position of `share` of the tokens, or of the end of a sentence close to it."""
        exact = round(share * len(self.ids))
        nearest = int(self.after_sentences[np.abs(self.after_sentences - exact).argmin()])
        is_close = 0 < share < 1 and abs(nearest - exact) <= _SNAPS * len(self.ids)
        return nearest if is_close else exact


def read_haystack(paths: Sequence[Path], tokenizer: TextTokenizer, *, most: int) -> Haystack:
    """Return the texts of files one after another, up to the one that reaches `most` tokens.

    Raises:
        ValueError: A file cannot be read as text.
    """
    ids, after, length = [], [np.zeros(1, dtype=np.int64)], 0
    for document in read_text(paths):
        text = document.text.rstrip() + "\n\n"
        encoded = encode_text(tokenizer, text)
        sentence_ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        ids.append(encoded.ids)
        after.append(length + 1 + np.flatnonzero(np.isin(encoded.ends, sentence_ends)))
        length += len(encoded.ids)
        if length >= most:
            break
    return Haystack(np.concatenate([*ids, np.empty(0, dtype=np.int64)]), np.concatenate(after))
