"""Statistics of the documents of token data: their lengths, and labels that count.

The length of a document is that of the sample it makes: of n tokens, n - 1 are trained on. Torch is
not needed, and memory is 24 bytes a document.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sppo.data.preparation.prepare import PERCENTILES
from sppo.data.tokens import TokenData
from sppo.units import KIB

_SHORT = (10, 50, 100, 200, 500)
"""Edges of the first buckets; those after them double from 1 Ki on."""
_BLOCK_DOCUMENTS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class DocumentLengths:
    """Lengths of all documents, sorted."""

    lengths: NDArray[np.int64]
    """[num_documents] ascending."""
    tokens_up_to: NDArray[np.int64]
    """[num_documents + 1] tokens of all documents before each one in that order."""

    @property
    def num_documents(self) -> int:
        """Documents, those of length 0 included."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.tokens_up_to[-1])

    def up_to(self, length: int) -> tuple[int, int]:
        """Return how many documents are at most so long, and how many tokens those have."""
        documents = int(np.searchsorted(self.lengths, length, side="right"))
        return documents, int(self.tokens_up_to[documents])

    def shares_longer(self, length: int) -> tuple[float, float]:
        """Return which fractions of all documents and of all tokens are in longer documents."""
        documents, tokens = self.up_to(length)
        return (
            1 - documents / self.num_documents,
            (self.num_tokens - tokens) / max(1, self.num_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBucket:
    """Documents between two lengths."""

    up_to: int
    """Length of the longest; those of the bucket before are shorter."""
    num_documents: int
    num_tokens: int
    documents_share: float
    """Fraction of all documents."""
    tokens_share: float
    """Fraction of all tokens."""
    longer_documents_share: float
    """Fraction of all documents that are longer than those of the bucket."""
    longer_tokens_share: float
    """Fraction of all tokens that are in longer documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitStats:
    """Documents that are longer than a ``sequence.length`` of ``length``, and what is cut there."""

    length: int
    num_longer_documents: int
    longer_documents_share: float
    longer_tokens_share: float
    num_samples_cut: int
    """Samples of one epoch with ``sequence.longer=cut``."""
    num_samples_drop: int
    """Samples of one epoch with ``sequence.longer=drop``."""


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Statistics that ``sppo data stats`` tells."""

    directory: str
    _: KW_ONLY
    num_documents: int
    num_tokens: int
    """Tokens to train on, as many as labels: all but one of each document."""
    num_counting_labels: int
    """Labels that the loss mask lets count; all of them without a mask."""
    has_loss_mask: bool
    num_documents_without_labels: int
    """Documents in which no label counts: of one token, or excluded by the loss mask."""
    mean_length: float
    longest: int
    length_percentiles: dict[str, int]
    """Length by percentile: p0, p10, ... p100."""
    buckets: tuple[LengthBucket, ...]
    limit: LimitStats | None
    """Figures for one length that was asked about."""


def document_lengths(document_offsets: NDArray[np.int64]) -> DocumentLengths:
    """Sort the lengths of documents.

    Args:
        document_offsets: [num_documents + 1] first token of each document, then num_tokens.
    """
    lengths = np.sort(np.diff(document_offsets) - 1)
    return DocumentLengths(lengths, np.concatenate([[0], np.cumsum(lengths)]))


def length_stats(
    data: TokenData, distribution: DocumentLengths, *, length: int | None = None
) -> LengthStats:
    """Summarise the lengths of documents.

    Args:
        data: Open token data.
        distribution: Lengths of its documents.
        length: A length to tell about as well, such as the ``sequence.length`` of a run.
    """
    lengths = distribution.lengths
    counting, without = _count_labels(data)
    percentiles = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    return LengthStats(
        directory=str(data.directory),
        num_documents=data.num_documents,
        num_tokens=distribution.num_tokens,
        num_counting_labels=counting,
        has_loss_mask=data.loss_mask is not None,
        num_documents_without_labels=without,
        mean_length=distribution.num_tokens / data.num_documents,
        longest=int(lengths[-1]),
        length_percentiles={
            f"p{percent}": int(value)
            for percent, value in zip(PERCENTILES, percentiles, strict=True)
        },
        buckets=_buckets(distribution),
        limit=None if length is None else _limit_stats(distribution, length=length),
    )


def _count_labels(data: TokenData) -> tuple[int, int]:
    """Labels that count, and documents without any."""
    counting, without = 0, 0
    for first in range(0, data.num_documents, _BLOCK_DOCUMENTS):
        offsets = np.asarray(data.document_offsets[first : first + _BLOCK_DOCUMENTS + 1])
        if data.loss_mask is None:
            labels = np.diff(offsets) - 1
        else:
            counts = data.loss_mask[offsets[0] : offsets[-1]] != 0
            starts = offsets[:-1] - offsets[0]
            labels = np.add.reduceat(counts, starts, dtype=np.int64) - counts[starts]
        counting += int(labels.sum())
        without += int(np.count_nonzero(labels == 0))
    return counting, without


def _buckets(distribution: DocumentLengths) -> tuple[LengthBucket, ...]:
    """Buckets up to the one that has the longest document."""
    longest = int(distribution.lengths[-1])
    edges = list(_SHORT)
    while edges[-1] < longest:
        edges.append(KIB if len(edges) == len(_SHORT) else 2 * edges[-1])
    while len(edges) > 1 and edges[-2] >= longest:
        edges.pop()
    return tuple(_bucket(distribution, low=low, high=high) for low, high in pairwise([-1, *edges]))


def _bucket(distribution: DocumentLengths, *, low: int, high: int) -> LengthBucket:
    """Documents longer than ``low`` and at most ``high`` long."""
    (before, tokens_before), (within, tokens_within) = map(distribution.up_to, (low, high))
    documents, tokens = within - before, tokens_within - tokens_before
    longer_documents, longer_tokens = distribution.shares_longer(high)
    return LengthBucket(
        up_to=high,
        num_documents=documents,
        num_tokens=tokens,
        documents_share=documents / distribution.num_documents,
        tokens_share=tokens / max(1, distribution.num_tokens),
        longer_documents_share=longer_documents,
        longer_tokens_share=longer_tokens,
    )


def _limit_stats(distribution: DocumentLengths, *, length: int) -> LimitStats:
    """Figures for one length."""
    lengths = distribution.lengths
    within, _ = distribution.up_to(length)
    without_labels, _ = distribution.up_to(0)
    documents_share, tokens_share = distribution.shares_longer(length)
    return LimitStats(
        length=length,
        num_longer_documents=len(lengths) - within,
        longer_documents_share=documents_share,
        longer_tokens_share=tokens_share,
        num_samples_cut=int((-(-lengths // length)).sum()),
        num_samples_drop=max(0, within - without_labels),
    )
