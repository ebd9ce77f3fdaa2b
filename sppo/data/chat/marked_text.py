"""Text of a document with the spans of characters that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Text, and the spans of its characters that are trained on."""

    text: str
    trained: tuple[tuple[int, int], ...] | None
    """Spans [start, end) of characters, ascending and apart; None if all characters are."""

    def counting(
        self, offsets: Sequence[tuple[int, int]] | NDArray[np.int64]
    ) -> NDArray[np.bool_] | None:
        """Return which tokens count in the loss: those that overlap a trained span; None for all.

        Args:
            offsets: [n] Span [start, end) of the characters of each token, as tokenizers give them.
        """
        if self.trained is None:
            return None
        covered = np.zeros(len(self.text) + 1, dtype=np.int64)  # trained characters before each
        for start, end in self.trained:
            covered[start + 1 : end + 1] = 1
        np.cumsum(covered, out=covered)
        spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        counts: NDArray[np.bool_] = covered[spans[:, 1]] > covered[spans[:, 0]]
        return counts
