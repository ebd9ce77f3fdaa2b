"""Haystack: the text in which needles are hidden, as tokens with the ends of its sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sppo.data.chat.marked_text import MarkedText
from sppo.data.preparation.documents import read_text
from sppo.data.preparation.tokenizer_file import FileTokenizer
from sppo.data.preparation.tokenizers import ByteTokenizer

TextTokenizer = ByteTokenizer | FileTokenizer

_SENTENCE_END = re.compile(r"[.!?](?=\s)|\n+")
_SNAPS = 0.02
"""A needle is moved to the end of a sentence within this share of the haystack."""


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
        text = document.rstrip() + "\n\n"
        ends = tuple(match.span() for match in _SENTENCE_END.finditer(text))
        ((own, ends_sentence),) = tokenizer.encode_texts([MarkedText(text, ends)])
        assert ends_sentence is not None, "the ends of sentences are marked"
        ids.append(own.astype(np.int64))
        after.append(length + 1 + np.flatnonzero(ends_sentence))
        length += len(own)
        if length >= most:
            break
    return Haystack(np.concatenate([*ids, np.empty(0, dtype=np.int64)]), np.concatenate(after))
