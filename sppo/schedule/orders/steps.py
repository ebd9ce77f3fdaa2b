"""Order of the forwards and backwards of all ranks, and how many forwards run ahead.

Every order here obeys the two rules of causal subsequences: within one sequence, forwards run in
ascending order (a subsequence reads the K/V before it) and backwards in descending order (dK/dV of
a subsequence is complete once all later subsequences ran), while sequences stay first in, first
out.

A *step* is a unit on a virtual stage, the number virtual * units + unit. The virtual stage is the
position of a stage on its rank, 0 if the rank has one stage; units are numbered over all sequences.

All ranks have the same forwards and the same backwards, each in one order. A schedule decides
only how many backwards a rank runs before each of its forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sppo.schedule.actions import Lengths
from sppo.schedule.encoding import B, Codes, F, W

Indices = npt.NDArray[np.intp]


def sequence_groups(lengths: Lengths, *, num_ranks: int) -> list[range]:
    """Return the groups of whole sequences that pass a virtual stage together when interleaved.

    A group must hold at least `num_ranks` units; otherwise its first unit is not back from the last
    rank when the next virtual stage needs it. A group must also hold whole sequences; otherwise a
    backward would start before all forwards of its sequence have run. Sequences are spread evenly
    over the groups, larger groups first, because a short last group can starve the ranks for good.
    """
    counts = [len(sequence) for sequence in lengths]
    if len({*counts}) > 1:
        return _groups_of_unequal(counts, num_ranks=num_ranks)
    smallest = counts[0]
    per_group = -(-num_ranks // smallest)
    num_groups = max(1, len(lengths) // per_group)
    size, larger = divmod(len(lengths), num_groups)
    groups, begin = [], 0
    for group in range(num_groups):
        end = begin + size + (group < larger)
        groups.append(range(begin, end))
        begin = end
    return groups


def _groups_of_unequal(counts: Sequence[int], *, num_ranks: int) -> list[range]:
    """Return the smallest groups of at least `num_ranks` units; the rest joins the last group."""
    ends, units = [0], 0
    for index, count in enumerate(counts):
        units += count
        if units >= num_ranks:
            ends.append(index + 1)
            units = 0
    if units and len(ends) > 1:
        ends.pop()
    if ends[-1] < len(counts):
        ends.append(len(counts))
    return [range(begin, end) for begin, end in pairwise(ends)]


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """Forwards and backwards of a rank: groups of sequences pass its virtual stages in turn.

    Attributes:
        forward: Steps in the order of their forwards: each group passes one virtual stage after
            another.
        backward: Steps in the order of their backwards: each group passes the virtual stages in
            reverse; first in, first out by sequence, last in, first out within one.
        place: Index in `forward` of each step.
        ended: Number of backwards of all groups before that of each forward.
        num_units: Number of units.
    """

    forward: Indices
    backward: Indices
    place: Indices
    ended: Indices
    num_units: int

    @classmethod
    def of_groups(cls, lengths: Lengths, *, groups: Sequence[range], num_virtual: int) -> Passes:
        """Return the passes of `groups` of consecutive sequences."""
        ends = np.cumsum([0, *map(len, lengths)])
        units = np.arange(ends[-1])
        mirrored = np.repeat(ends[:-1] + ends[1:], np.diff(ends)) - 1 - units
        begins = ends[[group.start for group in groups]]
        sizes = ends[[group.stop for group in groups]] - begins
        begin, size = np.repeat(begins, sizes), np.repeat(sizes, sizes)
        virtual = np.arange(num_virtual)[:, None]
        place = (num_virtual * begin + virtual * size + units - begin).ravel()
        back = (num_virtual * begin + virtual[::-1] * size + mirrored - begin).ravel()
        forward = np.argsort(place)
        ended = num_virtual * begin[forward % len(units)]
        return cls(forward, np.argsort(back), place, ended, len(units))

    def alternating(self, num_ranks: int, *, ahead_per_hop: int) -> Indices:
        """Return the backwards before each forward if ranks alternate after a warm-up.

        Before the k-th backward, the last rank has begun k + 1 forwards, and as many more as that
        backward and the later ones need to follow their own forwards. For N subsequences per
        sequence these are the N - 1 of Seq1F1B, and (v - 1) * G + N - 1 for v virtual stages and
        groups of G units. If sequences with most subsequences come first, the number shrinks once
        these are done, and fewer units are held: a step may take a few percent less or more time
        than with a constant warm-up.

        Other ranks run more forwards before each backward. They do not run a unit on a later
        virtual stage before the last rank has run it on the virtual stage before: that would be a
        deadlock.

        Args:
            num_ranks: Number of ranks.
            ahead_per_hop: Number of forwards that a rank runs ahead of the next one.

        Returns:
            Number of backwards, [ranks, forwards].
        """
        index, hops = np.arange(self.forward.size), np.arange(num_ranks)[::-1, None]
        needed = self.place[self.backward] - index
        warmup = np.maximum.accumulate(needed[::-1])[::-1]
        begun = np.maximum.accumulate(np.minimum(index.size, index + 1 + warmup))
        last = np.searchsorted(begun, index, side="right")
        behind = index - ahead_per_hop * hops
        before = np.where(behind >= 0, last[np.maximum(behind, 0)], 0)
        later = np.flatnonzero(self.forward >= self.num_units)
        on_stage_before = self.place[self.forward[later] - self.num_units]
        # A rank lags behind the last one by a backward per hop.
        before[:, later] = np.maximum(before[:, later], last[on_stage_before] - hops)
        return np.maximum.accumulate(before, axis=1)


def merged(passes: Passes, before: Indices) -> tuple[Codes, Indices]:
    """Return the opcodes and steps of every rank in order, [ranks, 2 * steps] each.

    Args:
        passes: Forwards and backwards of every rank.
        before: Number of backwards before each forward, [ranks, forwards].
    """
    ranks, count = before.shape
    codes = np.full((ranks, 2 * count), B, dtype=np.int32)
    np.put_along_axis(codes, np.arange(count) + before, F, axis=1)
    steps = np.empty(codes.shape, dtype=np.intp)
    for code, order in ((F, passes.forward), (B, passes.backward)):
        steps[codes == code] = np.concatenate([order] * ranks)
    return codes, steps


def with_weights(codes: Codes, steps: Indices, *, delays: Indices) -> tuple[Codes, Indices]:
    """Split every backward and run its weight half some backwards later (ZB-H1).

    The delayed weight gradients fill the idle time at the end of the step. Rank r of a zero-bubble
    schedule delays by r, so that every rank holds as many units as rank 0 does under 1F1B.

    Args:
        codes: Opcodes of every rank in order, [ranks, 2 * steps].
        steps: Steps of every rank in order.
        delays: Number of backwards between a backward and its weight half, of each rank.
    """
    ranks, actions = codes.shape
    halves = np.maximum(0, np.cumsum(codes == B, axis=1) - (codes == B) - delays[:, None])
    at = np.arange(actions) + halves
    split = np.full((ranks, actions + actions // 2), W, dtype=np.int32)
    np.put_along_axis(split, at, codes, axis=1)
    order = np.empty(split.shape, dtype=np.intp)
    np.put_along_axis(order, at, steps, axis=1)
    order[split == W] = steps[codes == B]
    return split, order
