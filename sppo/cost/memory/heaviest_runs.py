"""Runs whose working sets outweigh those of all neighbouring subsequences of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from sppo.activations.placement import Counts
from sppo.cost.live_sets.attention_live_sets import SPAN_KEYS
from sppo.cost.memory.unit_runs import UnitRun

Units = Counts | slice
"""Subsequences of a block, by index."""
_SIMILAR = 0.9
"""A subsequence at least so long, relative to the longest of its neighbours, counts as that."""


@lru_cache(maxsize=256)
def runs_of_blocks(
    lengths: tuple[int, ...], prefixes: tuple[int, ...], kinds: bytes, *, on_gpu: bool
) -> tuple[tuple[slice, tuple[tuple[UnitRun, Units], ...]], ...]:
    """Neighbouring subsequences of similar length, and runs that outweigh all of them.

    Args:
        lengths: tokens of each.
        prefixes: tokens of its sequence before each.
        kinds: of each, see :func:`unit_kinds`, as int64.
        on_gpu: whether they run on a GPU.

    Returns:
        Pairs of a block of subsequences, and of runs with the subsequences, counted within the
        block, for which they count.
    """
    tokens, of_each = np.array(lengths, dtype=np.int64), np.frombuffer(kinds, dtype=np.int64)
    behind = np.minimum(np.array(prefixes, dtype=np.int64), SPAN_KEYS)
    runs_of: Callable[[Counts, Counts, Counts], Iterator[tuple[UnitRun, Units]]]
    runs_of = _extreme_runs if on_gpu else _heaviest_runs
    return tuple(
        (block, tuple(runs_of(tokens[block], behind[block], of_each[block])))
        for block in _blocks(lengths)
    )


def _blocks(lengths: Sequence[int]) -> Sequence[slice]:
    """Neighbouring subsequences of similar length; the farther behind, the more of them."""
    edges, longest = [0], lengths[0]
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if length < _SIMILAR * longest and 8 * (index - edges[-1]) >= index:
            edges.append(index)
            longest = length
    return [slice(a, b) for a, b in pairwise([*edges, len(lengths)])]


def _extreme_runs(
    lengths: Counts, prefixes: Counts, kinds: Counts
) -> Iterator[tuple[UnitRun, Counts]]:
    """Yield runs that together outweigh all neighbouring units of a kind on a GPU, and those units.

    What backward has freed grows with the subsequence, and what attention takes with the prefix.
    Both do so evenly, so the most is needed by the longest or by the shortest, behind the longest
    prefix.

    Args:
        lengths: tokens of each.
        prefixes: tokens before each, as far as they are read at once.
        kinds: of each, see :func:`unit_kinds`.
    """
    for kind in np.unique(kinds).tolist():
        which = np.flatnonzero(kinds == kind)
        behind, tokens = int(prefixes[which].max()), lengths[which]
        for extreme in {int(tokens.min()), int(tokens.max())}:
            yield UnitRun.of_kind(kind, extreme, behind), which


def _heaviest_runs(
    lengths: Counts, prefixes: Counts, kinds: Counts
) -> Iterator[tuple[UnitRun, slice]]:
    """Yield the runs of neighbouring units that none other of them outweighs, on a CPU.

    A longer one needs more, and so does one behind a longer prefix, up to the part of a prefix
    that is read at once.

    Args:
        lengths: tokens of each.
        prefixes: tokens before each, as far as they are read at once.
        kinds: of each, see :func:`unit_kinds`.
    """
    for kind in np.unique(kinds).tolist():
        which = np.flatnonzero(kinds == kind)[::-1]
        behind, longest = prefixes[which], np.maximum.accumulate(lengths[which])
        # The last of those with the same prefix has seen them all, and all behind a longer one.
        ends = np.flatnonzero(np.append(behind[1:] != behind[:-1], True))
        most = 0
        for tokens, prefix in zip(longest[ends].tolist(), behind[ends].tolist(), strict=True):
            if tokens > most:
                most = tokens
                yield UnitRun.of_kind(kind, tokens, prefix), slice(None)
