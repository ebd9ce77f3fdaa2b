"""Largest blocks into which attention is divided, by the rules of the block kernels.

The rules are those of :mod:`sppo.kernels.attention.blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.tiles import BAND_TILE_TOKENS, HALF_TOKENS, MAX_CAUSAL_TOKENS, MAX_FULL_KEYS


class BlockKind(Enum):
    """Kind of a block; in a ``FULL`` rectangle every query sees every key.

    The key heads of a rectangle are as they are, and the query heads of a key head are folded into
    its rows. The other kinds have as many key heads as query heads.
    """

    FULL = auto()
    CAUSAL = auto()
    BAND = auto()


class Block:
    """Block of the attention matrix of a subsequence."""

    def __init__(self, s: TensorSizes, name: str, kind: BlockKind, rows: int, keys: int) -> None:
        self.s, self.name, self.kind, self.rows, self.keys = s, name, kind, rows, keys
        self.is_full = kind is BlockKind.FULL
        self.is_part = self.is_full and rows < s.rows
        """True for a rectangle of some of the rows, which are put together by key head."""
        self.folded_rows = rows * s.group if self.is_full else rows
        """Rows of the call of a kernel for each key head."""
        self.key_heads = s.key_heads if self.is_full else s.heads
        """Key heads of the call."""
        self.mask_elements = rows * keys * (kind is BlockKind.BAND)
        """Elements of the mask of a band; 0 for the other kinds."""

    def row_bytes(self, element_bytes: int) -> int:
        """Return the bytes of q, o, or the gradient of one of them, for the rows of the block."""
        return self.s.pooled(self.rows * self.s.heads * self.s.model.head_dim * element_bytes)

    def key_bytes(self, element_bytes: int, *, keys: int | None = None) -> int:
        """Return the bytes of k, v, or a gradient of one of them, for all keys or some of them."""
        count = self.keys if keys is None else keys
        return self.s.pooled(count * self.key_heads * self.s.model.head_dim * element_bytes)


def largest_blocks(s: TensorSizes) -> Iterator[Block]:
    """Yield the largest blocks of every kind."""
    rows, window = s.rows, s.kind.window
    square = _largest_square(rows)
    yield Block(s, "a causal square", BlockKind.CAUSAL, square, square)
    if rows > MAX_CAUSAL_TOKENS:
        keys = first_half(rows)
        yield Block(s, "half of a square", BlockKind.FULL, rows - keys, keys)
    prefix = s.prefix
    if window is not None:
        prefix = min(prefix, window)
    if prefix:
        yield Block(s, "the prefix", BlockKind.FULL, rows, min(prefix, MAX_FULL_KEYS))
    if window is not None and s.seen_keys > window:
        band = min(rows, BAND_TILE_TOKENS)
        yield Block(s, "a band", BlockKind.BAND, band, min(s.seen_keys, band + window - 1))


def _largest_square(rows: int) -> int:
    """Return the rows of the largest causal square, after halving those that are too large."""
    while rows > MAX_CAUSAL_TOKENS:
        first = first_half(rows)
        rows = max(first, rows - first)
    return rows


def first_half(rows: int) -> int:
    """Return the rows of the first half of a causal square."""
    return -(-(rows // 2) // HALF_TOKENS) * HALF_TOKENS
