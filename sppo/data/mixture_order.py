"""Order in which a run reads the samples of several sources, a pure function of its position.

Positions are divided into blocks of equally many draws, in each of which every source has the same
number of draws: shares are exact in every block. Within a block the draws are permuted. A source
reads its own samples in its own order, which depends on nothing but the seed, its name and its
number of samples, so a source that is renamed or added does not reorder the others. The state of a
run's data is one integer, as without a mixture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sppo.data.order import SequenceOrder

_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 10, 1 << 16
"""Draws of a block, which is doubled until every source has a draw."""


@dataclass(frozen=True, slots=True)
class MixtureOrder:
    """Order in which a run reads the samples of several sources, by position.

    Samples are numbered through all sources, one source after another.
    """

    sources: tuple[SequenceOrder, ...]
    """Order of the samples of each source."""
    draws: tuple[int, ...]
    """Number of draws of each source in a block."""
    _: KW_ONLY
    seed: int

    @property
    def covering(self) -> int:
        """Number of positions, from the first on, that have every sample at least once."""
        blocks = max(
            -(-order.num_sequences // draws)
            for order, draws in zip(self.sources, self.draws, strict=True)
        )
        return blocks * sum(self.draws)

    def sequence_indices(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the samples read at ``count`` positions from ``position`` on, int64 [count]."""
        assert position >= 0, f"position {position}"
        size = sum(self.draws)
        parts = []
        while count > 0:
            block, first = divmod(position, size)
            taken = min(count, size - first)
            parts.append(self._indices_in_block(block, first=first, count=taken))
            position, count = position + taken, count - taken
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def _indices_in_block(self, block: int, *, first: int, count: int) -> NDArray[np.int64]:
        """Return the samples at ``count`` positions of one block, int64 [count]."""
        sources, ranks = (part[first : first + count] for part in self._block(block))
        samples, offset = np.empty(count, dtype=np.int64), 0
        for source, (order, draws) in enumerate(zip(self.sources, self.draws, strict=True)):
            own = np.flatnonzero(sources == source)
            if len(own):  # successive draws of a source are successive positions of its order
                occurrence = block * draws + int(ranks[own[0]])
                samples[own] = offset + order.sequence_indices(occurrence, len(own))
            offset += order.num_sequences
        return samples

    def draws_before(self, position: int) -> tuple[int, ...]:
        """Return the number of draws of each source at the positions before ``position``."""
        blocks, rest = divmod(position, sum(self.draws))
        sources, _ = self._block(blocks)
        last = np.bincount(sources[:rest], minlength=len(self.draws))
        return tuple(blocks * draws + int(n) for draws, n in zip(self.draws, last, strict=True))

    def _block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return _block_table(self.draws, self.seed, block)


@lru_cache(maxsize=4)
def _block_table(
    draws: tuple[int, ...], seed: int, block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each draw of a block, and its rank among the draws of that source."""
    size = sum(draws)
    slots = SequenceOrder(size, seed=seed, shuffle=True).sequence_indices(block * size, size)
    sources = np.searchsorted(np.cumsum(draws), slots, side="right")
    ranks = np.empty(size, dtype=np.int64)
    ranks[np.argsort(sources, kind="stable")] = np.concatenate([np.arange(n) for n in draws])
    return sources, ranks


def draws_of_block(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the draws of each source in a block, by largest remainder.

    Args:
        shares: Share of each source in the draws, in any unit. A source has no draw if its share is
            too small even for the largest block, 65536 draws.
    """
    size = _SMALLEST_BLOCK
    while not all(draws := _largest_remainder(shares, size)) and size < _LARGEST_BLOCK:
        size *= 2
    return draws


def _largest_remainder(shares: Sequence[Fraction], size: int) -> tuple[int, ...]:
    """Divide `size` draws by shares; the draws left over go to the largest remainders."""
    exact = [size * share / sum(shares) for share in shares]
    draws = [int(one) for one in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: draws[index] - exact[index])
    for index in by_remainder[: size - sum(draws)]:
        draws[index] += 1
    return tuple(draws)


def seed_of_source(seed: int, name: str) -> int:
    """Return the seed of a source's order, from the seed of the run and the source's name."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little"
    )
