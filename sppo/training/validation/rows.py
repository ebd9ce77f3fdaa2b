"""Tokens and labels of rows of a set."""

from __future__ import annotations

import torch

from sppo.data.sample_rows import TrainingData
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL
from sppo.planning.evaluated_rows import Row


def row_data(samples: TrainingData, row: Row) -> SequenceData:
    """Return tokens and labels of a row; what its samples do not fill has no labels."""
    length = row.boundaries[-1]
    data = samples.row(row.samples) if row.samples else _nothing()
    filled = len(data.tokens_S)
    if filled == length:
        return data
    padding = torch.zeros(length - filled, dtype=data.tokens_S.dtype)
    return SequenceData(
        torch.cat([data.tokens_S, padding]),
        torch.cat([data.labels_S, torch.full_like(padding, IGNORED_LABEL)]),
        tuple(dict.fromkeys((*data.document_starts, filled))),
    )


def sample_of_tokens(samples: TrainingData, row: Row) -> torch.Tensor:
    """Return the place of each token's sample in ``row.samples``, ``[S]``; padding has the last."""
    lengths = [*samples.lengths(row.samples)] or [0]
    lengths[-1] += row.boundaries[-1] - sum(lengths)
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _nothing() -> SequenceData:
    nothing = torch.empty(0, dtype=torch.int64)
    return SequenceData(nothing, nothing, ())
