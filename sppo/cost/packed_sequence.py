"""Packed sequence, and the parts of samples in each subsequence, by which attention is priced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from sppo.hardware.rates import Floats


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """Samples side by side in one sequence, each of which attends only to itself.

    Attributes:
        samples: Tokens of each sample, in order.
        lengths: Tokens of each subsequence, whose boundaries may lie inside a sample.
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        tokens, cut = sum(self.samples), sum(self.lengths)
        if tokens != cut or min((*self.samples, *self.lengths), default=0) < 1:
            raise ValueError(
                f"samples of {list(self.samples)} tokens do not fill subsequences of "
                f"{list(self.lengths)}: both must be above 0 and have the same sum"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(self.lengths)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries of subsequences, from 0 to the number of tokens."""
        return tuple(accumulate(self.lengths, initial=0))

    def parts(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the parts [begin, end) of samples in each subsequence, [subsequences][parts]."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.lengths]
        ends = [*accumulate(self.lengths)]
        index = position = 0
        for tokens in self.samples:
            first, begin = position, position
            while begin < first + tokens:
                end = min(first + tokens, ends[index])
                found[index].append((begin - first, end - first))
                begin = end
                index += end == ends[index]
            position = first + tokens
        return tuple(map(tuple, found))


@dataclass(frozen=True, slots=True, eq=False)
class SampleParts:
    """Parts of samples that each subsequence computes, by which attention is priced.

    Attributes:
        begins: First position of each part within its sample, [parts].
        ends: One past the last position of each part within its sample, [parts].
        firsts: Index of the first part of each subsequence, ascending, [subsequences].
    """

    begins: Floats
    ends: Floats
    firsts: npt.NDArray[np.intp]

    @property
    def tokens(self) -> Floats:
        """Number of tokens of each subsequence, [subsequences]."""
        return self.by_subsequence(self.ends - self.begins)

    def by_subsequence(self, of_parts: Floats) -> Floats:
        """Return the sums of `of_parts` [parts] over the parts of each subsequence."""
        if len(self.firsts) == len(self.begins):
            return of_parts
        sums: Floats = np.add.reduceat(of_parts, self.firsts)
        return sums


def parts_of_sequence(lengths: Sequence[int]) -> SampleParts:
    """Return the parts of a sequence that is a single sample."""
    ends = np.cumsum(lengths).astype(np.float64)
    return SampleParts(ends - np.array(lengths), ends, np.arange(len(lengths)))


def parts_of_packed(sequences: Iterable[PackedSequence]) -> SampleParts:
    """Return the parts of all subsequences of `sequences`, one sequence after another."""
    parts = [part for sequence in sequences for part in sequence.parts()]
    table = np.array([span for part in parts for span in part], dtype=np.float64)
    counts = [len(part) for part in parts]
    firsts = np.array([0, *accumulate(counts[:-1])], dtype=np.intp)
    return SampleParts(table[:, 0], table[:, 1], firsts)
