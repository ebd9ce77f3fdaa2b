"""Losses of a set, in total and by position in the context, and exact matches of its samples.

The mean loss is the sum over all labels divided by their number, both over all replicas. It is the
same for any degrees of parallelism and any packing, up to rounding in fp64.

A sample is an exact match if all its labels are the most likely tokens, each after the true ones:
if only the tokens of an answer count, greedy generation would give this answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sppo.data.sample_rows import TrainingData
from sppo.engine.label_losses import LabelLosses
from sppo.engine.unit import SequenceData
from sppo.parallel.host_collectives import HostCollectives
from sppo.planning.evaluated_rows import Row

_FIRST_BIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PositionLoss:
    """Mean loss of the tokens at positions ``[start, end)`` of their sequence."""

    start: int
    end: int
    loss: float
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class SetLosses:
    """Losses of a set over all ranks."""

    total_loss: float
    """Sum of the losses of all labels, in nats."""
    num_labels: int
    by_position: tuple[PositionLoss, ...]
    sample_labels: NDArray[np.int64]
    """Number of labels of each sample."""
    sample_correct: NDArray[np.int64]
    """Number of labels of each sample that are predicted greedily."""

    @property
    def loss(self) -> float:
        """Mean loss over all labels; NaN if the set has none."""
        return _share(self.total_loss, self.num_labels)

    @property
    def accuracy(self) -> float:
        """Share of the labels that are predicted greedily; NaN if the set has none."""
        return _share(int(self.sample_correct.sum()), self.num_labels)

    @property
    def exact_samples(self) -> NDArray[np.bool_]:
        """True for each sample that has labels and is an exact match."""
        is_exact: NDArray[np.bool_] = self.sample_correct == self.sample_labels
        return is_exact & (self.sample_labels > 0)

    @property
    def exact(self) -> float:
        """Share of exact matches among the samples that have labels; NaN if there are none."""
        return _share(int(self.exact_samples.sum()), int((self.sample_labels > 0).sum()))


def _share(part: float, whole: int) -> float:
    return part / whole if whole else float("nan")


class LossSums:
    """Sums of this rank's losses, to which the losses of one row after another are added.

    Args:
        length: Most tokens of a sample.
        num_samples: Number of samples.
    """

    def __init__(self, *, length: int, num_samples: int) -> None:
        self._bins = bins_of(length)
        # Columns: losses and labels; labels and correct predictions.
        self._of_bins, self._of_samples = np.zeros((len(self._bins), 2)), np.zeros((num_samples, 2))

    def add(self, samples: TrainingData, row: Row, data: SequenceData, found: LabelLosses) -> None:
        """Add the losses of a row.

        Args:
            samples: Samples of the set.
            row: Row of the tokens.
            data: Tokens and labels of the row, on the host.
            found: Losses of its labels that this rank has.
        """
        if not row.samples:
            return
        ends = [end for _, end in self._bins[:-1]]
        of_bins = found.by_position(data.document_starts, ends)
        self._of_bins += np.stack((of_bins.losses_G, of_bins.labels_G), 1)
        own = found.by_sample(samples.lengths(row.samples))
        self._of_samples[list(row.samples)] += np.stack((own.labels_G, own.correct_G), 1)

    def over_ranks(self, peers: HostCollectives) -> SetLosses:
        """Return the losses of all ranks. Collective."""
        mine = np.concatenate([self._of_bins, self._of_samples])
        told = np.array(peers.total(mine.ravel().tolist())).reshape(mine.shape)
        losses, labels = told[: len(self._bins)].T
        sample_labels, sample_correct = told[len(self._bins) :].T
        return SetLosses(
            float(losses.sum()),
            round(labels.sum()),
            tuple(
                PositionLoss(*edges, float(loss / count), round(count))
                for edges, loss, count in zip(self._bins, losses, labels, strict=True)
                if count
            ),
            sample_labels.astype(np.int64),
            sample_correct.astype(np.int64),
        )


def bins_of(length: int) -> list[tuple[int, int]]:
    """Return bins of positions that double in width: [0, 64), [64, 128), [128, 256), ..."""
    bins, start, end = [], 0, min(_FIRST_BIN_TOKENS, length)
    while start < length:
        bins.append((start, end))
        start, end = end, min(end * 2, length)
    return bins
