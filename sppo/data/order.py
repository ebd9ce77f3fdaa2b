"""The order of training sequences: a pure function of (seed, epoch, position).

One integer, the number of sequences consumed so far, is the whole state of a run's data.
"""

from __future__ import annotations

import hashlib
from dataclasses import KW_ONLY, dataclass

_ROUNDS = 8
# A Feistel network over fewer than 64 values mixes poorly; walking more cycles costs microseconds.
_MIN_HALF_BITS = 3


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """Which of ``num_sequences`` training sequences comes at each position of a run.

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

    def _permute(self, value: int, *, epoch: int) -> int:
        """A bijection of the values of ``2 * half_bits`` bits, at least ``num_sequences`` many."""
        half_bits = max(_MIN_HALF_BITS, ((self.num_sequences - 1).bit_length() + 1) // 2)
        mask = (1 << half_bits) - 1
        left, right = value >> half_bits, value & mask
        for turn in range(_ROUNDS):
            key = f"{self.seed} {epoch} {turn} {right}".encode()
            mixed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
            left, right = right, left ^ (mixed & mask)
        return left << half_bits | right
