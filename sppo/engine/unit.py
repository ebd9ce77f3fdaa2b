"""Units of a step: subsequences of its sequences, with tokens, labels and positions.

The head computes the tokens whose label counts, and no others. Which these are is decided on the
host, so that no GPU is waited for.

Legend: S tokens of a sequence, C tokens of a unit on this rank, L labels of these that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sppo.kernels.labels import IGNORED_LABEL
from sppo.parallel.ulysses import shard_tokens
from sppo.schedule.actions import UnitKey

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SequenceData:
    """Tokens and labels of one sequence of S tokens."""

    tokens_S: Tensor
    """Ids below the size of the vocabulary, int64."""
    labels_S: Tensor
    """Label of each token, shifted over the whole sequence; ``IGNORED_LABEL``, -100, without a
    target. No other negative number is allowed. Best left on the host: the engine copies those that
    count."""
    document_starts: tuple[int, ...] = (0,)
    """Ascending start positions of documents isolated from each other in attention; (0,) if none
    are."""

    @property
    def num_valid(self) -> int:
        """Number of labels that are not ignored."""
        return int((self.labels_S != IGNORED_LABEL).sum())


class Run(NamedTuple):
    """Consecutive positions of a sequence, ``[start, end)``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens ``[start, end)`` of a sequence."""

    start: int
    end: int
    boundaries: tuple[int, ...]
    """Boundaries of all subsequences of the sequence, from 0 to its length."""
    document_starts: tuple[int, ...] = (0,)

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return self.boundaries[-1]


@dataclass(frozen=True, slots=True)
class UnitLabels:
    """Labels that count of some consecutive tokens of a sequence, in the order of the tokens."""

    labels_L: Tensor
    """Targets of the tokens, on the device."""
    rows_L: Tensor | None
    """Index of each target's token among the tokens, on the device; None if all labels count."""
    positions_L: Tensor
    """Position of each target's token in the sequence, int64 on the host."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One subsequence of one sequence of the step, or this rank's shard of its tokens."""

    sequence: int
    subsequence: int
    span: TokenSpan
    """Positions of the whole subsequence."""
    shard_tokens: tuple[int, ...]
    """Number of tokens on each rank over which the unit is sharded; one entry if it is not."""
    tokens_C: Tensor
    labels: UnitLabels
    """Labels of the tokens; of all tokens of the unit if this is an MSP shard of it."""
    positions_C: Tensor
    """Position of each token in its document, or in its sequence if documents are not isolated."""
    span_positions_C: Tensor
    """Positions of all tokens of the subsequence, including those of other ranks."""

    @property
    def key(self) -> UnitKey:
        """Pair (sequence, subsequence) that identifies the unit within its step."""
        return self.sequence, self.subsequence

    @property
    def first_token(self) -> int:
        """Index of the first token among this rank's tokens of the whole unit."""
        return 0

    @property
    def runs(self) -> tuple[Run, ...]:
        """Positions in the sequence of the tokens of each rank over which the unit is sharded."""
        bounds = accumulate(self.shard_tokens, initial=self.span.start)
        return tuple(Run(*run) for run in pairwise(bounds))


def units_of(
    sequence: int, data: SequenceData, boundaries: Sequence[int], *, rank: int = 0, degree: int = 1
) -> dict[UnitKey, Unit]:
    """Return the units of one sequence by (sequence, subsequence), with one rank's tokens.

    Args:
        sequence: Index of the sequence in its step.
        data: Tokens and labels of the sequence.
        boundaries: Boundaries of its subsequences, from 0 to its length.
        rank: Index of this rank among the ranks over which the tokens of each unit are sharded.
        degree: Number of these ranks.

    Raises:
        ValueError: The boundaries do not tile the sequence, or a subsequence has fewer tokens than
            there are ranks.
    """
    length, device, cuts = data.tokens_S.shape[0], data.tokens_S.device, tuple(boundaries)
    if boundaries[0] != 0 or boundaries[-1] != length:
        raise ValueError(f"boundaries {list(boundaries)} do not tile a sequence of {length} tokens")
    sharded, own = [], []
    for start, end in pairwise(boundaries):
        if end - start < degree:
            raise ValueError(
                f"a subsequence of {end - start} tokens cannot be shared by {degree} "
                "sequence-parallel ranks: use fewer, longer subsequences"
            )
        tokens = shard_tokens(end - start, degree=degree)
        first = start + sum(tokens[:rank])
        sharded.append(tokens)
        own.append(slice(first, first + tokens[rank]))
    positions_S = document_positions(length, data.document_starts, device=device)
    labels = counting_labels(data.labels_S, own, device=device)
    parts = zip(pairwise(boundaries), sharded, own, labels, strict=True)
    return {
        (sequence, index): Unit(
            sequence,
            index,
            TokenSpan(start, end, cuts, data.document_starts),
            tokens,
            data.tokens_S[part],
            of_part,
            positions_S[part],
            positions_S[start:end],
        )
        for index, ((start, end), tokens, part, of_part) in enumerate(parts)
    }


def counting_labels(
    labels_S: Tensor, parts: Sequence[slice], *, device: torch.device
) -> Iterator[UnitLabels]:
    """Yield the labels that count of each part of a sequence; waits for no device but theirs."""
    labels_S = labels_S.cpu()
    counts_S = labels_S != IGNORED_LABEL
    all_count = [bool(counts_S[part].all()) for part in parts]
    positions, rows = [], []
    for part, every in zip(parts, all_count, strict=True):
        own = torch.arange(part.stop - part.start) if every else counts_S[part].nonzero().squeeze(1)
        positions.append(part.start + own)
        rows.append(own[:0] if every else own)
    targets = _copied_together([labels_S[own] for own in positions], device)
    indices = _copied_together(rows, device)
    for target, index, every, own in zip(targets, indices, all_count, positions, strict=True):
        yield UnitLabels(target, None if every else index, own)


def _copied_together(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Return tensors of the host on a device, by one copy."""
    return torch.split(copied(torch.cat(list(parts)), device), [len(part) for part in parts])


def copied(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, without waiting for the device."""
    if device.type == "cuda":  # a copy from pageable memory would block the host
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def document_positions(
    length: int, document_starts: Sequence[int], *, device: torch.device = _CPU
) -> Tensor:
    """Return the position of each token relative to the start of its document, ``[S]``."""
    positions = torch.arange(length, device=device)
    edges = sorted({0, *document_starts})
    if len(edges) == 1:
        return positions
    starts = copied(torch.tensor(edges), device)
    return positions - starts.take(torch.searchsorted(starts, positions, right=True) - 1)
