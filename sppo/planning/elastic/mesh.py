"""Mesh: the positions at which all samples of a step are cut.

Slices between these positions take equal time. Later slices are shorter, since their attention
reads more tokens. Positions count from the beginning of a sample, so a mesh made for long samples
also serves shorter ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from sppo.planning.elastic.sample_cost import SampleCost

_SIZES_PER_DOUBLING = 8


@dataclass(frozen=True, slots=True)
class SliceMesh:
    """Positions at which samples are cut, and the target size of a subsequence.

    Attributes:
        ends: End of each slice of the longest sample, ascending.
        room: Most tokens of a subsequence of several samples.
        slice_s: Target seconds of a subsequence, equal for all so that pipeline ranks do not wait;
            None if only tokens count.
    """

    ends: tuple[int, ...]
    room: int
    slice_s: float | None = None

    @property
    def slices(self) -> tuple[int, ...]:
        """Tokens of each slice of the longest sample."""
        return tuple(end - begin for begin, end in pairwise((0, *self.ends)))


def planned_mesh(cost: SampleCost, lengths: Sequence[int], *, balanced: bool) -> SliceMesh:
    """Return the mesh of the cuts of a run's plan.

    Args:
        cost: Cost of parts of samples.
        lengths: Tokens of each slice of the longest sample.
        balanced: Whether subsequences should take equal time, rather than have equal tokens.
    """
    slice_s = _seconds(cost, 0, lengths[0]) if balanced else None
    return SliceMesh(tuple(accumulate(lengths)), max(lengths), slice_s)


def equal_mesh(longest: int, tokens: int) -> SliceMesh:
    """Return the mesh whose slices have equal tokens, for samples of up to `longest` tokens."""
    return SliceMesh((*range(tokens, longest, tokens), longest), tokens)


@lru_cache(maxsize=128)
def mesh_of_first_slice(
    cost: SampleCost, *, longest: int, first: int, least: int, room: int, alignment: int
) -> SliceMesh:
    """Return the mesh whose slices take as long as a first slice of a given number of tokens.

    Args:
        cost: Cost of parts of samples.
        longest: Tokens of the longest sample.
        first: Tokens of the first slice.
        least: Least tokens of later slices, even if they take longer than the first: on many
            devices attention of few queries is slow.
        room: Most tokens of a subsequence of several samples.
        alignment: Multiple of tokens at which to cut after the first slice.
    """
    slice_s = _seconds(cost, 0, first)
    doublings = max(1, int(np.ceil(np.log2(longest))))
    sizes = 2.0 ** np.linspace(0, doublings, doublings * _SIZES_PER_DOUBLING + 1)
    alone_s = cost.without_attention_s(sizes)
    ends = [min(first, longest)]
    while ends[-1] < longest:
        begins = np.full(len(sizes), float(ends[-1]))
        seconds = np.maximum.accumulate(alone_s + cost.attention_s(begins, begins + sizes))
        tokens = int(np.interp(slice_s, seconds, sizes))
        tokens = max(tokens // alignment * alignment, least, alignment)
        ends.append(min(longest, ends[-1] + tokens))
    return SliceMesh(tuple(ends), room, slice_s)


def _seconds(cost: SampleCost, begin: int, end: int) -> float:
    """Return the seconds of the slice [begin, end) of a sample."""
    span = np.array([begin], dtype=np.float64), np.array([end], dtype=np.float64)
    return float(cost.without_attention_s(span[1] - span[0])[0] + cost.attention_s(*span)[0])
