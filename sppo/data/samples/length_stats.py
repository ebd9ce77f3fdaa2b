"""Statistics of the documents of token data: lengths, and numbers of valid labels.

The length of a document is the length of its sample: n - 1 for n tokens, of which n - 1 are inputs.
Torch is not needed, and memory is 24 bytes per document.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sppo.data.tokens import TokenData
from sppo.units import KIB

_EDGES = (10, 50, 100, 200, 500, *(KIB << power for power in range(40)))
"""Upper lengths of buckets."""
_PERCENTILES = (0, 10, 50, 90, 99, 100)
_BLOCK_DOCUMENTS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class DocumentLengths:
    """Sorted lengths of all documents."""

    lengths: NDArray[np.int64]
    """[num_documents] Lengths, ascending."""
    tokens_up_to: NDArray[np.int64]
    """[num_documents + 1] Sum of the lengths before each index of ``lengths``."""

    @classmethod
    def of(cls, data: TokenData) -> Self:
        """Return the lengths of the documents of token data."""
        lengths = np.sort(np.diff(data.document_offsets) - 1)
        return cls(lengths, np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def num_documents(self) -> int:
        """Number of documents, those of length 0 included."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Sum of the lengths of all documents."""
        return int(self.tokens_up_to[-1])

    def up_to(self, length: int) -> tuple[int, int]:
        """Return the number of documents of at most ``length`` tokens, and their tokens."""
        documents = int(np.searchsorted(self.lengths, length, side="right"))
        return documents, int(self.tokens_up_to[documents])

    def shares_longer(self, length: int) -> tuple[float, float]:
        """Return the fractions of documents, and of tokens, in documents longer than ``length``."""
        documents, tokens = self.up_to(length)
        return (
            1 - documents / self.num_documents,
            (self.num_tokens - tokens) / max(1, self.num_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBucket:
    """Number and share of the documents in one range of lengths."""

    up_to: int
    """Largest length of the bucket; the smallest is above `up_to` of the bucket before."""
    num_documents: int
    num_tokens: int
    documents_share: float
    """Fraction of all documents that are in the bucket."""
    tokens_share: float
    """Fraction of all tokens that are in the bucket."""
    longer_documents_share: float
    """Fraction of all documents that are longer than `up_to`."""
    longer_tokens_share: float
    """Fraction of all tokens that are in documents longer than `up_to`."""


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Statistics that ``sppo data stats`` prints."""

    directory: str
    _: KW_ONLY
    num_documents: int
    num_tokens: int
    """Number of input tokens, and of labels: all tokens but one of each document."""
    num_counting_labels: int
    """Number of labels that the loss mask does not exclude; all without a mask."""
    has_loss_mask: bool
    num_documents_without_labels: int
    """Number of documents without valid labels: of one token, or excluded by the loss mask."""
    mean_length: float
    longest: int
    length_percentiles: dict[str, int]
    """Length by percentile: p0, p10, ... p100."""
    buckets: tuple[LengthBucket, ...]


def length_stats(data: TokenData, *, length: int | None = None) -> LengthStats:
    """Return the statistics of the documents of token data.

    Args:
        data: Open token data.
        length: A ``sequence.length`` that is the largest length of a bucket, too; None for none.
    """
    counting, without = _count_labels(data)
    distribution = DocumentLengths.of(data)
    longest = int(distribution.lengths[-1])
    edges = {*_EDGES[: bisect_left(_EDGES, longest) + 1], *([] if length is None else [length])}
    return LengthStats(
        directory=str(data.directory),
        num_documents=data.num_documents,
        num_tokens=distribution.num_tokens,
        num_counting_labels=counting,
        has_loss_mask=data.loss_mask is not None,
        num_documents_without_labels=without,
        mean_length=distribution.num_tokens / data.num_documents,
        longest=longest,
        length_percentiles=_percentiles(distribution.lengths),
        buckets=tuple(
            _bucket(distribution, low, high) for low, high in pairwise([-1, *sorted(edges)])
        ),
    )


def _percentiles(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Return the lengths at p0, p10, p50, p90, p99 and p100, each of which occurs."""
    values = np.percentile(lengths, _PERCENTILES, method="inverted_cdf").tolist()
    return {f"p{at}": int(value) for at, value in zip(_PERCENTILES, values, strict=True)}


def _count_labels(data: TokenData) -> tuple[int, int]:
    """Return the number of valid labels, and the number of documents without valid labels."""
    counting, without = 0, 0
    for first in range(0, data.num_documents, _BLOCK_DOCUMENTS):
        offsets = np.asarray(data.document_offsets[first : first + _BLOCK_DOCUMENTS + 1])
        counts = data.counts(int(offsets[0]), int(offsets[-1]))
        starts = offsets[:-1] - offsets[0]
        labels = np.add.reduceat(counts, starts, dtype=np.int64) - counts[starts]
        counting += int(labels.sum())
        without += int(np.count_nonzero(labels == 0))
    return counting, without


def _bucket(distribution: DocumentLengths, low: int, high: int) -> LengthBucket:
    """Return the bucket of the documents longer than ``low`` and at most ``high`` long."""
    (before, tokens_before), (within, tokens_within) = map(distribution.up_to, (low, high))
    longer_documents, longer_tokens = distribution.shares_longer(high)
    return LengthBucket(
        up_to=high,
        num_documents=within - before,
        num_tokens=tokens_within - tokens_before,
        documents_share=(within - before) / distribution.num_documents,
        tokens_share=(tokens_within - tokens_before) / max(1, distribution.num_tokens),
        longer_documents_share=longer_documents,
        longer_tokens_share=longer_tokens,
    )
