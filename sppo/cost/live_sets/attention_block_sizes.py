"""Largest blocks into which attention is divided, by the rules of the block kernels.

The rules are those of :mod:`sppo.kernels.attention.blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from sppo.cost.live_sets.tensor_sizes import TensorSizes

CAUSAL_TOKENS = 2048
"""Most rows of a causal square."""
PREFIX_KEYS = 8192
"""Most keys of a part of a prefix."""
BAND_ROWS = 512
"""Most rows of a band, which a sliding window makes."""
HALF_TOKENS = 256
"""Multiple of tokens at which squares are halved. In bf16, blocks of rows and keys that are no
multiples are computed in fp32 by :mod:`sppo.kernels.attention.cpu_flash`."""


class BlockKind(Enum):
    """Kind of a block; in a ``FULL`` rectangle every query sees every key.

    The key heads of a rectangle are as they are, and the query heads of a key head are folded into
    its rows. The other kinds have as many key heads as query heads.
    """

    FULL = auto()
    CAUSAL = auto()
    BAND = auto()


class Block(NamedTuple):
    """Block of the attention matrix."""

    name: str
    kind: BlockKind
    rows: int
    keys: int


def largest_blocks(s: TensorSizes) -> Iterator[Block]:
    """Yield the largest blocks of every kind."""
    rows, window = s.rows, s.model.sliding_window
    square = _largest_square(rows)
    yield Block("a causal square", BlockKind.CAUSAL, square, square)
    if rows > CAUSAL_TOKENS:
        keys = first_half(rows)
        yield Block("half of a square", BlockKind.FULL, rows - keys, keys)
    prefix = s.prefix
    if window is not None and s.model.sliding_window_first_layer == 0:
        prefix = min(prefix, window)
    if prefix:
        yield Block("the prefix", BlockKind.FULL, rows, min(prefix, PREFIX_KEYS))
    if window is not None and s.seen_keys > window:
        band = min(rows, BAND_ROWS)
        yield Block("a band", BlockKind.BAND, band, min(s.seen_keys, band + window - 1))


def _largest_square(rows: int) -> int:
    """Return the rows of the largest causal square, after halving those that are too large."""
    while rows > CAUSAL_TOKENS:
        first = first_half(rows)
        rows = max(first, rows - first)
    return rows


def first_half(rows: int) -> int:
    """Return the rows of the first half of a causal square."""
    return -(-(rows // 2) // HALF_TOKENS) * HALF_TOKENS
