"""Units of work: the subsequences of the sequences of one step, with their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sppo.kernels.cross_entropy import IGNORED_LABEL


@dataclass(frozen=True, slots=True)
class SequenceData:
    """One sequence of S tokens."""

    tokens_S: Tensor
    labels_S: Tensor
    """Shifted on the whole sequence; ``IGNORED_LABEL`` where there is no target."""
    document_starts: tuple[int, ...] = (0,)
    """Positions that start a document attention must not cross; (0,) where it may."""

    @property
    def num_valid(self) -> int:
        """Labels that count."""
        return int((self.labels_S != IGNORED_LABEL).sum())


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, end)`` of a sequence of ``length`` tokens."""

    start: int
    end: int
    length: int
    document_starts: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Unit:
    """One subsequence of one sequence of the step."""

    sequence: int
    subsequence: int
    span: Span
    tokens_C: Tensor
    labels_C: Tensor
    positions_C: Tensor
    """Position of each token in its document (in its sequence, when documents are not isolated)."""


def units_of(
    sequence: int, data: SequenceData, boundaries: Sequence[int]
) -> dict[tuple[int, int], Unit]:
    """The units of one sequence by (sequence, subsequence).

    Raises:
        ValueError: the boundaries do not tile the sequence.
    """
    length = data.tokens_S.shape[0]
    if boundaries[0] != 0 or boundaries[-1] != length:
        raise ValueError(f"boundaries {list(boundaries)} do not tile a sequence of {length} tokens")
    positions_S = document_positions(length, data.document_starts).to(data.tokens_S.device)
    units = {}
    for index, (start, end) in enumerate(pairwise(boundaries)):
        units[sequence, index] = Unit(
            sequence,
            index,
            Span(start, end, length, data.document_starts),
            data.tokens_S[start:end],
            data.labels_S[start:end],
            positions_S[start:end],
        )
    return units


def document_positions(length: int, document_starts: Sequence[int]) -> Tensor:
    """Position of each token counted from the start of its document, ``[S]``."""
    positions = torch.arange(length)
    starts = torch.tensor(sorted({0, *document_starts}))
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
