"""Sums of the losses of a set: of all labels, by position in the context, and by sample.

The mean loss is the sum over all labels divided by their number, both over all replicas. It is the
same for any degrees of parallelism and any packing, up to rounding in fp64.

Legend: S tokens of a row, L labels that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.data.sample_rows import TrainingData
from sppo.engine.label_losses import LabelLosses
from sppo.engine.unit import SequenceData, document_positions
from sppo.parallel.host_collectives import HostCollectives
from sppo.planning.evaluated_rows import Row
from sppo.training.validation.rows import sample_of_tokens

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
    sample_losses: Tensor
    """Sum of the losses of each sample, float64 [samples]."""
    sample_labels: Tensor
    """Number of labels of each sample, int64 [samples]."""

    @property
    def loss(self) -> float:
        """Mean loss over all labels; NaN if the set has none."""
        return self.total_loss / self.num_labels if self.num_labels else float("nan")


class LossSums:
    """Sums of this rank's losses, to which the losses of one row after another are added.

    Args:
        length: Most tokens of a sample.
        num_samples: Number of samples.
    """

    def __init__(self, *, length: int, num_samples: int) -> None:
        self._losses_S = torch.zeros(length, dtype=torch.float64)
        self._counts_S = torch.zeros(length, dtype=torch.int64)
        self._of_samples = torch.zeros(num_samples, dtype=torch.float64)
        self._counts_of_samples = torch.zeros(num_samples, dtype=torch.int64)

    def add(self, samples: TrainingData, row: Row, data: SequenceData, found: LabelLosses) -> None:
        """Add the losses of some labels of a row.

        Args:
            samples: Samples of the set.
            row: Row of the labels.
            data: Tokens and labels of the row, on the host.
            found: Losses of the labels.
        """
        losses_L = found.losses_L.double().cpu()
        positions_L = document_positions(len(data.tokens_S), data.document_starts)[
            found.positions_L
        ]
        ones_L = torch.ones_like(positions_L)
        self._losses_S.index_add_(0, positions_L, losses_L)
        self._counts_S.index_add_(0, positions_L, ones_L)
        if row.samples:
            samples_L = torch.tensor(row.samples)[sample_of_tokens(samples, row)[found.positions_L]]
            self._of_samples.index_add_(0, samples_L, losses_L)
            self._counts_of_samples.index_add_(0, samples_L, ones_L)

    def over_ranks(self, peers: HostCollectives) -> SetLosses:
        """Return the losses of all ranks. Collective."""
        bins = bins_of(len(self._losses_S))
        of_bins, counts_of_bins = (
            [table[slice(*edges)].sum() for edges in bins]
            for table in (self._losses_S, self._counts_S)
        )
        mine = [
            torch.stack([self._losses_S.sum(), *of_bins]),
            torch.stack([self._counts_S.sum(), *counts_of_bins]),
            self._of_samples,
            self._counts_of_samples,
        ]
        told = torch.tensor(peers.total(torch.cat(mine).tolist()), dtype=torch.float64)
        losses, counts, of_samples, of_counts = torch.split(told, [len(table) for table in mine])
        (total_loss, *of_bins), (num_labels, *of_counts_of_bins) = losses.tolist(), counts.tolist()
        return SetLosses(
            total_loss,
            round(num_labels),
            tuple(
                PositionLoss(*edges, loss / count, round(count))
                for edges, loss, count in zip(bins, of_bins, of_counts_of_bins, strict=True)
                if count
            ),
            of_samples,
            of_counts.round().long(),
        )


def bins_of(length: int) -> list[tuple[int, int]]:
    """Return bins of positions that double in width: [0, 64), [64, 128), [128, 256), ..."""
    bins, start, end = [], 0, min(_FIRST_BIN_TOKENS, length)
    while start < length:
        bins.append((start, end))
        start, end = end, min(end * 2, length)
    return bins
