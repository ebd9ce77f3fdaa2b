"""The order of training sequences or samples: a pure function of (seed, epoch, position).

One integer, the number of them consumed so far, is the whole state of a run's data.
"""

from __future__ import annotations

import hashlib
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
# A Feistel network over fewer than 64 values mixes poorly; walking more cycles costs microseconds.
_MIN_HALF_BITS = 3


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """Order in which ``num_sequences`` training sequences come in a run, by position.

    Every epoch is a permutation of all sequences, so each is read exactly once per epoch. It is
    computed an element at a time by a Feistel network keyed by (seed, epoch), walking its cycle
    until the value is in range (Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002): no table, and the same order on every machine and library version.
    """

    num_sequences: int
    _: KW_ONLY
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        assert self.num_sequences >= 1, f"{self.num_sequences} sequences"

    def epoch_of(self, position: int) -> int:
        """Passes over the data completed before ``position``."""
        return position // self.num_sequences

    def sequence_index(self, position: int) -> int:
        """Sequence read at ``position``, the number of sequences consumed before it in the run."""
        assert position >= 0, f"position {position}"
        epoch, rank = divmod(position, self.num_sequences)
        if not self.shuffle or self.num_sequences == 1:
            return rank
        value = self._permute(rank, epoch=epoch)
        while value >= self.num_sequences:
            value = self._permute(value, epoch=epoch)
        return value

    def sequence_indices(self, position: int, count: int) -> NDArray[np.int64]:
        """Sequences read at ``count`` positions from ``position`` on, int64 [count].

        They are those of :meth:`sequence_index`, looked up in tables of an epoch: a microsecond
        each, after as many hashes as eight times the root of ``num_sequences``.
        """
        assert position >= 0, f"position {position}"
        parts = []
        while count > 0:
            epoch, rank = divmod(position, self.num_sequences)
            taken = min(count, self.num_sequences - rank)
            parts.append(self._indices_in_epoch(epoch, first=rank, count=taken))
            position, count = position + taken, count - taken
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def _indices_in_epoch(self, epoch: int, *, first: int, count: int) -> NDArray[np.int64]:
        """Sequences at ``count`` positions of one epoch."""
        values = np.arange(first, first + count, dtype=np.int64)
        if not self.shuffle or self.num_sequences == 1:
            return values
        tables = _round_tables(self.seed, epoch, self._half_bits)
        values = _permute_all(values, tables)
        while len(outside := np.flatnonzero(values >= self.num_sequences)):
            values[outside] = _permute_all(values[outside], tables)
        return values

    @property
    def _half_bits(self) -> int:
        """Bits of each half of a value that is permuted."""
        return max(_MIN_HALF_BITS, ((self.num_sequences - 1).bit_length() + 1) // 2)

    def _permute(self, value: int, *, epoch: int) -> int:
        """A bijection of the values of ``2 * half_bits`` bits, at least ``num_sequences`` many."""
        half_bits = self._half_bits
        mask = (1 << half_bits) - 1
        left, right = value >> half_bits, value & mask
        for turn in range(_ROUNDS):
            mixed = _mixed(self.seed, epoch, turn, right)
            left, right = right, left ^ (mixed & mask)
        return left << half_bits | right


def _mixed(seed: int, epoch: int, turn: int, half: int) -> int:
    """Return 64 pseudo-random bits of one half, in one round of the network."""
    key = f"{seed} {epoch} {turn} {half}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


@lru_cache(maxsize=4)
def _round_tables(seed: int, epoch: int, half_bits: int) -> NDArray[np.int64]:
    """Return what every round of an epoch mixes into each half, int64 [rounds, 2^half_bits]."""
    size = 1 << half_bits
    values = [
        [_mixed(seed, epoch, turn, half) & (size - 1) for half in range(size)]
        for turn in range(_ROUNDS)
    ]
    return np.array(values, dtype=np.int64)


def _permute_all(values: NDArray[np.int64], tables: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bijection of all ``values`` at once."""
    size = tables.shape[1]
    left, right = values // size, values % size
    for table in tables:
        left, right = right, left ^ table[right]
    permuted: NDArray[np.int64] = left * size + right
    return permuted
