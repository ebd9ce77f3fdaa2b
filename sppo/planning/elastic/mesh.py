"""Mesh: the positions at which all samples of a step are cut.

Slices between these positions take equal time. Later slices are shorter, since their attention
reads more tokens. Positions count from the beginning of a sample, so a mesh made for long samples
also serves shorter ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from sppo.hardware.rates import Floats
from sppo.planning.elastic.sample_cost import SampleCost
from sppo.planning.partition import boundaries_by_length

_HALVINGS = 24
_BEGINS_PER_DOUBLING = 4
_SIZES_PER_DOUBLING = 8
_LEAST_BEGIN = 64


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


@lru_cache(maxsize=16)
def mesh_of_slices(
    cost: SampleCost, *, longest: int, slices: int, balanced: bool, alignment: int
) -> SliceMesh:
    """Return the mesh that cuts the longest sample of a run into a given number of slices.

    Args:
        cost: Cost of parts of samples.
        longest: Tokens of the longest sample.
        slices: Number of slices, at most `longest`.
        balanced: Whether slices take equal time, rather than have equal tokens.
        alignment: Multiple of tokens at which to cut; lowered to the mean slice if that is shorter.
    """
    alignment = max(1, min(alignment, longest // slices))
    if not balanced or slices == 1:
        cuts = boundaries_by_length(longest, num_subsequences=slices, alignment=alignment)
        most = max(end - begin for begin, end in pairwise(cuts))
        return SliceMesh(cuts[1:], most, _seconds(cost, 0, most) if balanced else None)
    low, high = 0.0, _seconds(cost, 0, longest)
    ends = [longest]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _ends(cost, longest, slice_s=middle, alignment=alignment, most=slices)
        if found is None:
            low = middle
        else:
            high, ends = middle, found
    cut = _with_all_slices(ends, slices, alignment)
    most = max(end - begin for begin, end in pairwise((0, *cut)))
    return SliceMesh(cut, most, _seconds(cost, 0, cut[0]))


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
    later = _ends(cost, longest, slice_s=slice_s, alignment=alignment, begin=first, least=least)
    assert later is not None, "any number of slices will do"
    return SliceMesh((min(first, longest), *later), room, slice_s)


def _ends(
    cost: SampleCost,
    longest: int,
    *,
    slice_s: float,
    alignment: int,
    begin: int = 0,
    least: int = 1,
    most: int | None = None,
) -> list[int] | None:
    """Cut a sample from `begin` to `longest` into slices that take at most `slice_s` each.

    A slice has at least `least` and at least `alignment` tokens, even if it takes longer.

    Returns:
        The end of each slice; None if there would be more than `most` slices.
    """
    begins, sizes, seconds = _slice_seconds(cost, longest)
    found: list[int] = []
    at = begin
    while at < longest:
        if len(found) == most:
            return None
        place = min(bisect_right(begins, at), len(begins) - 1)
        low, high = begins[place - 1], begins[place]
        share = min(1.0, (at - low) / (high - low))
        from_here = (1 - share) * seconds[place - 1] + share * seconds[place]
        tokens = int(np.interp(slice_s, from_here, sizes))
        at = min(longest, at + max(tokens // alignment * alignment, least, alignment))
        found.append(at)
    return found


@lru_cache(maxsize=16)
def _slice_seconds(cost: SampleCost, longest: int) -> tuple[list[float], Floats, Floats]:
    """Return first positions and tokens of slices, and their seconds, [positions, tokens]."""
    begins = np.concatenate([[0.0], _by_doublings(_LEAST_BEGIN, longest, _BEGINS_PER_DOUBLING)])
    tokens = _by_doublings(1, longest, _SIZES_PER_DOUBLING)
    grid = np.repeat(begins, len(tokens)), np.tile(tokens, len(begins))
    seconds = cost.without_attention_s(grid[1]) + cost.attention_s(grid[0], grid[0] + grid[1])
    by_begin = np.maximum.accumulate(seconds.reshape(len(begins), len(tokens)), axis=1)
    return begins.tolist(), tokens, by_begin


def _by_doublings(first: int, last: int, count: int) -> Floats:
    """Return a geometric series from `first` to at least `last`, with `count` per doubling."""
    doublings = max(1, int(np.ceil(np.log2(max(2.0, last / first)))))
    found: Floats = first * 2.0 ** np.linspace(0, doublings, doublings * count + 1)
    return found


def _with_all_slices(ends: Sequence[int], slices: int, alignment: int) -> tuple[int, ...]:
    """Return the ends of slices, with the longest slices halved until there are `slices`."""
    cuts = [0, *ends]
    while len(cuts) <= slices:
        sizes = [end - begin for begin, end in pairwise(cuts)]
        place = int(np.argmax(sizes))
        half = max(1, sizes[place] // 2 // alignment * alignment or sizes[place] // 2)
        cuts.insert(place + 1, cuts[place] + half)
    return tuple(cuts[1:])


def _seconds(cost: SampleCost, begin: int, end: int) -> float:
    """Return the seconds of the slice [begin, end) of a sample."""
    span = np.array([begin], dtype=np.float64), np.array([end], dtype=np.float64)
    return float(cost.without_attention_s(span[1] - span[0])[0] + cost.attention_s(*span)[0])
