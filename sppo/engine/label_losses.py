"""Losses of labels, and whether each label was predicted, by document and by position.

:meth:`sppo.engine.engine.Engine.accumulate` and ``evaluate_together`` return one
:class:`LabelLosses` for each of their sequences, on every rank. Each label is computed by one rank
of those with the last stage, so sums over the ranks of a replica are sums over its labels::

    for data, own in zip(sequences, result.losses, strict=True):
        sums = own.by_document(data.document_starts)  # of this rank: add those of all ranks
        exact = sums.correct_G == sums.labels_G  # after that

Legend: L labels that count, G groups of labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class LabelSums(NamedTuple):
    """Sums over the labels of each group; those of several ranks and sequences can be added."""

    losses_G: NDArray[np.float64]
    labels_G: NDArray[np.int64]
    """Number of labels."""
    correct_G: NDArray[np.int64]
    """Number of correct predictions: all of a document's labels for a greedy exact match."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelLosses:
    """Losses of the labels of one sequence that count, as far as this rank computed them.

    Empty on ranks without the last stage. All methods wait for the device, once.
    """

    positions_L: Tensor
    """Position in the sequence of the token that predicts each label, ascending, on the host."""
    losses_L: Tensor
    """Loss of each label, unscaled, in fp32 or better, on the device."""
    correct_L: Tensor
    """Whether no logit exceeds the label's, bool, on the device: a tie counts as correct."""

    def by_document(self, document_starts: Sequence[int]) -> LabelSums:
        """Return the sums of each document of the sequence.

        Args:
            document_starts: Those of the sequence, the first of which is 0.
        """
        return self._sums(self.documents(document_starts), len(document_starts))

    def by_sample(self, lengths: Sequence[int]) -> LabelSums:
        """Return the sums of each sample of a packed sequence.

        Args:
            lengths: Tokens of each sample, in their order; padding may follow the last.
        """
        return self.by_document([0, *accumulate(lengths[:-1])])

    def by_position(self, document_starts: Sequence[int], edges: Sequence[int]) -> LabelSums:
        """Return the sums of each range of positions of tokens in their documents.

        Args:
            document_starts: Those of the sequence, the first of which is 0.
            edges: Ascending ends of all ranges but the last: (64, 128) makes [0, 64), [64, 128)
                and the rest.
        """
        starts = np.asarray(document_starts)[self.documents(document_starts)]
        groups = np.searchsorted(edges, self.positions_L.numpy() - starts, side="right")
        return self._sums(groups, len(edges) + 1)

    def documents(self, document_starts: Sequence[int]) -> NDArray[np.int64]:
        """Return the index of the document of each label."""
        return np.searchsorted(document_starts, self.positions_L.numpy(), side="right") - 1

    def _sums(self, groups_L: NDArray[np.int64], count: int) -> LabelSums:
        losses_G = np.zeros(count)
        np.add.at(losses_G, groups_L, self.losses_L.double().cpu().numpy())
        correct_L = self.correct_L.cpu().numpy()
        labels_G, correct_G = (
            np.bincount(groups, minlength=count) for groups in (groups_L, groups_L[correct_L])
        )
        return LabelSums(losses_G, labels_G, correct_G)
