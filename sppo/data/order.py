"""Order of training sequences or samples, a pure function of (seed, epoch, position).

The state of a run's data is one integer, the number of sequences or samples consumed so far.
"""

from __future__ import annotations

import hashlib
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
# A Feistel network over fewer than 64 values mixes poorly; walking more cycles costs microseconds.
_MIN_HALF_BITS = 3


class Order(Protocol):
    """Order in which a run reads training sequences or samples, by position."""

    @property
    def covering(self) -> int:
        """Number of positions, from the first on, that have every sample at least once."""

    def sequence_indices(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the sequences read at ``count`` positions from ``position`` on, int64 [count]."""


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """Order in which a run reads ``num_sequences`` training sequences, by position.

    Every epoch is a permutation of all sequences, so each is read exactly once per epoch. Elements
    of the permutation are computed by a Feistel network keyed by (seed, epoch), whose cycle is
    walked until the value is in range (Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002). It takes ``8 * sqrt(num_sequences)`` hashes per epoch, and is the same on every machine
    and library version.
    """

    num_sequences: int
    _: KW_ONLY
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        assert self.num_sequences >= 1, f"{self.num_sequences} sequences"

    @property
    def covering(self) -> int:
        """Number of positions, from the first on, that have every sample: an epoch."""
        return self.num_sequences

    def sequence_indices(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the sequences read at ``count`` positions from ``position`` on, int64 [count]."""
        assert position >= 0, f"position {position}"
        parts = []
        while count > 0:
            epoch, rank = divmod(position, self.num_sequences)
            taken = min(count, self.num_sequences - rank)
            parts.append(self._indices_in_epoch(epoch, first=rank, count=taken))
            position, count = position + taken, count - taken
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def _indices_in_epoch(self, epoch: int, *, first: int, count: int) -> NDArray[np.int64]:
        """Return the sequences at ``count`` positions of one epoch, int64 [count]."""
        values = np.arange(first, first + count, dtype=np.int64)
        if not self.shuffle or self.num_sequences == 1:
            return values
        half_bits = max(_MIN_HALF_BITS, ((self.num_sequences - 1).bit_length() + 1) // 2)
        tables = _round_tables(self.seed, epoch, half_bits)
        values = _permute(values, tables)
        while len(outside := np.flatnonzero(values >= self.num_sequences)):
            values[outside] = _permute(values[outside], tables)
        return values


@lru_cache(maxsize=32)  # of the sources of a mixture, each with an epoch of its own
def _round_tables(seed: int, epoch: int, half_bits: int) -> NDArray[np.int64]:
    """Return the round functions of an epoch as tables, int64 [rounds, 2^half_bits]."""
    size = 1 << half_bits
    tables = np.empty((_ROUNDS, size), dtype=np.int64)
    for turn in range(_ROUNDS):
        for half in range(size):
            key = f"{seed} {epoch} {turn} {half}".encode()
            mixed = hashlib.blake2b(key, digest_size=8).digest()
            tables[turn, half] = int.from_bytes(mixed, "little") & (size - 1)
    return tables


def _permute(values: NDArray[np.int64], tables: NDArray[np.int64]) -> NDArray[np.int64]:
    """Map all ``values`` by the bijection of an epoch, given its tables."""
    size = tables.shape[1]
    left, right = values // size, values % size
    for table in tables:
        left, right = right, left ^ table[right]
    permuted: NDArray[np.int64] = left * size + right
    return permuted
