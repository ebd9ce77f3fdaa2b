"""Selection of the runs whose working sets bound those of neighbouring similar subsequences.

A run is a tuple of tokens, prefix and placement, on which a working set depends. Few runs per block
of similar subsequences keep the cost of memory prediction low.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from sppo.activations.placement import Counts
from sppo.cost.live_sets.gpu_attention_live_sets import SPAN_KEYS
from sppo.cost.memory.unit_runs import UnitRun

Units = Counts | slice
"""Indices of subsequences within a block."""
_SIMILAR = 0.9
"""Least length of a subsequence relative to the longest of its block for which it counts as long
as the longest."""


@lru_cache(maxsize=256)
def runs_of_blocks(
    lengths: tuple[int, ...], prefixes: tuple[int, ...], kinds: bytes, *, keeps_a_stack: bool
) -> tuple[tuple[slice, tuple[tuple[UnitRun, Units], ...]], ...]:
    """Return blocks of neighbouring subsequences of similar length, and runs that bound each block.

    Args:
        lengths: Tokens of each subsequence.
        prefixes: Tokens before each subsequence in its sequence.
        kinds: Kind of each subsequence, see :func:`sppo.cost.memory.unit_runs.unit_kinds`, as bytes
            of int64.
        keeps_a_stack: Whether retained tensors are copied to a stack, as on a CPU with one stage.

    Returns:
        Pairs of a block and its runs, each run with the subsequences that it bounds, by their
        indices within the block.
    """
    tokens, of_each = np.array(lengths, dtype=np.int64), np.frombuffer(kinds, dtype=np.int64)
    behind = np.minimum(np.array(prefixes, dtype=np.int64), SPAN_KEYS)
    runs_of: Callable[[Counts, Counts, Counts], Iterator[tuple[UnitRun, Units]]]
    runs_of = _heaviest_runs if keeps_a_stack else _extreme_runs
    return tuple(
        (block, tuple(runs_of(tokens[block], behind[block], of_each[block])))
        for block in _blocks(lengths)
    )


def _blocks(lengths: Sequence[int]) -> Sequence[slice]:
    """Return blocks of neighbouring subsequences of similar length; later blocks are longer."""
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
    """Yield runs that together bound all units of a kind in a block, and these units.

    Memory that backward has freed grows with the subsequence, memory of attention with the prefix,
    both linearly. So the working set is largest for the longest or the shortest subsequence, after
    the longest prefix.

    Args:
        lengths: Tokens of each subsequence.
        prefixes: Tokens before each subsequence, up to the number that is read at once.
        kinds: Kind of each subsequence, see :func:`sppo.cost.memory.unit_runs.unit_kinds`.
    """
    for kind in sorted(set(kinds.tolist())):
        which = np.flatnonzero(kinds == kind)
        behind, tokens = int(prefixes[which].max()), lengths[which]
        for extreme in {int(tokens.min()), int(tokens.max())}:
            yield UnitRun.of_kind(kind, extreme, behind), which


def _heaviest_runs(
    lengths: Counts, prefixes: Counts, kinds: Counts
) -> Iterator[tuple[UnitRun, slice]]:
    """Yield the runs of a block with a stack that no other run of the block exceeds.

    The working set grows with the subsequence, and with the prefix up to the part of a prefix that
    is read at once.

    Args:
        lengths: Tokens of each subsequence.
        prefixes: Tokens before each subsequence, up to the number that is read at once.
        kinds: Kind of each subsequence, see :func:`sppo.cost.memory.unit_runs.unit_kinds`.
    """
    for kind in sorted(set(kinds.tolist())):
        which = np.flatnonzero(kinds == kind)[::-1]
        behind, longest = prefixes[which], np.maximum.accumulate(lengths[which])
        # The running maximum at the last unit of a prefix includes all units of this prefix and of
        # longer ones.
        ends = np.flatnonzero(np.append(behind[1:] != behind[:-1], True))
        most = 0
        for tokens, prefix in zip(longest[ends].tolist(), behind[ends].tolist(), strict=True):
            if tokens > most:
                most = tokens
                yield UnitRun.of_kind(kind, tokens, prefix), slice(None)
