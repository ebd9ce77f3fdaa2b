"""Mesh of places at which the samples of a step are cut, one for all of them.

Slices of a sample between places take equally long, so later ones are shorter: they have more
tokens before them. A mesh goes from the first token on, so one that is made for long samples serves
shorter ones, too.
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
    """Places at which samples are cut, and the size that a subsequence is to have.

    Attributes:
        ends: End of each slice of the longest sample, ascending.
        room: Tokens of a subsequence of several samples at most.
        slice_s: Seconds that a subsequence is to take, as pipeline ranks that wait for each other
            want it; None where only tokens count.
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
    """Cut the longest sample of a run into a given number of slices.

    Args:
        cost: of its parts.
        longest: its tokens.
        slices: how many, at most `longest`.
        balanced: whether they take equally long, or have equal tokens.
        alignment: of the cuts, lowered where so many slices would be shorter.
    """
    alignment = max(1, min(alignment, longest // slices))
    if not balanced or slices == 1:
        cuts = boundaries_by_length(longest, num_subsequences=slices, alignment=alignment)
        most = max(end - begin for begin, end in pairwise(cuts))
        return SliceMesh(cuts[1:], most, _seconds(cost, 0, most) if balanced else None)
    table = _slice_seconds(cost, longest)
    low, high = 0.0, _seconds(cost, 0, longest)
    ends = [longest]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = table.ends(longest, slice_s=middle, alignment=alignment, most=slices)
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
    """Cut samples into slices that take as long as one of so many tokens at the beginning.

    Args:
        cost: of their parts.
        longest: tokens of the longest sample.
        first: tokens of the first slice.
        least: tokens of later slices at least, though they take longer: on many devices attention
            of few queries is slow.
        room: tokens of a subsequence of several samples at most.
        alignment: of the cuts.
    """
    slice_s = _seconds(cost, 0, first)
    later = _slice_seconds(cost, longest).ends(
        longest, slice_s=slice_s, alignment=alignment, begin=first, least=least
    )
    assert later is not None, "any number of slices will do"
    return SliceMesh((min(first, longest), *later), room, slice_s)


@dataclass(frozen=True, slots=True, eq=False)
class _SliceSeconds:
    """Seconds of slices by where they begin and how many tokens they have, to look up many times.

    Attributes:
        begins: Ascending, from 0.
        tokens: Ascending.
        seconds: Of each, ascending with tokens, [begins, tokens].
    """

    begins: tuple[float, ...]
    tokens: Floats
    seconds: Floats

    def ends(
        self,
        longest: int,
        *,
        slice_s: float,
        alignment: int,
        begin: int = 0,
        least: int = 1,
        most: int | None = None,
    ) -> list[int] | None:
        """Return ends of slices from `begin` on that take at most `slice_s` each.

        A slice has at least `least` tokens and one step of alignment, whatever it takes.

        Returns:
            None where that makes more than `most` slices.
        """
        found: list[int] = []
        at = begin
        while at < longest:
            if len(found) == most:
                return None
            tokens = int(np.interp(slice_s, self._of(at), self.tokens))
            at = min(longest, at + max(tokens // alignment * alignment, least, alignment))
            found.append(at)
        return found

    def _of(self, begin: int) -> Floats:
        """Seconds of slices that begin there, [tokens]."""
        place = min(bisect_right(self.begins, begin), len(self.begins) - 1)
        low, high = self.begins[place - 1], self.begins[place]
        share = min(1.0, (begin - low) / (high - low))
        row: Floats = (1 - share) * self.seconds[place - 1] + share * self.seconds[place]
        return row


@lru_cache(maxsize=16)
def _slice_seconds(cost: SampleCost, longest: int) -> _SliceSeconds:
    begins = np.concatenate([[0.0], _by_doublings(_LEAST_BEGIN, longest, _BEGINS_PER_DOUBLING)])
    tokens = _by_doublings(1, longest, _SIZES_PER_DOUBLING)
    grid = np.repeat(begins, len(tokens)), np.tile(tokens, len(begins))
    seconds = cost.without_attention_s(grid[1]) + cost.attention_s(grid[0], grid[0] + grid[1])
    by_begin = np.maximum.accumulate(seconds.reshape(len(begins), len(tokens)), axis=1)
    return _SliceSeconds(tuple(begins.tolist()), tokens, by_begin)


def _by_doublings(first: int, last: int, count: int) -> Floats:
    """Return numbers from `first` to `last` or a little more, so many each doubling."""
    doublings = max(1, int(np.ceil(np.log2(max(2.0, last / first)))))
    found: Floats = first * 2.0 ** np.linspace(0, doublings, doublings * count + 1)
    return found


def _with_all_slices(ends: Sequence[int], slices: int, alignment: int) -> tuple[int, ...]:
    """Halve the longest slices until there are as many as asked for."""
    cuts = [0, *ends]
    while len(cuts) <= slices:
        sizes = [end - begin for begin, end in pairwise(cuts)]
        place = int(np.argmax(sizes))
        half = max(1, sizes[place] // 2 // alignment * alignment or sizes[place] // 2)
        cuts.insert(place + 1, cuts[place] + half)
    return tuple(cuts[1:])


def _seconds(cost: SampleCost, begin: int, end: int) -> float:
    """Return the seconds of one slice of a sample."""
    span = np.array([begin], dtype=np.float64), np.array([end], dtype=np.float64)
    return float(cost.without_attention_s(span[1] - span[0])[0] + cost.attention_s(*span)[0])
