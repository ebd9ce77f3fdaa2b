"""Division of a span's visible part of the attention matrix into blocks.

A span's queries are the last C of T positions (bottom-right aligned): the query at position i sees
the keys of its document at positions ``<= i``, with a sliding window the last ``window`` of these.
The visible pairs are tiled by blocks of three kinds, each supported by fast kernels:

    FULL    every query sees every key        the prefix, most of the work
    CAUSAL  square, query i sees keys <= i    the diagonal
    BAND    causal within a sliding window    small, with an explicit mask

Every visible (query, key) pair lies in exactly one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import ceil

from sppo.cost.tiles import BAND_TILE_TOKENS, HALF_TOKENS, MAX_CAUSAL_TOKENS, MAX_FULL_KEYS

# Most rows and keys of a rectangle beyond whole units, so that casting its operands is cheap.
MAX_REMAINDER_TOKENS = 256


class BlockKind(StrEnum):
    """Kind of a block: mask of the (query, key) pairs inside it."""

    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``[q0, q1)`` of the span against keys ``[k0, k1)`` of the prefix.

    Query positions count from the start of the span, key positions from the start of the sequence.
    """

    kind: BlockKind
    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def num_queries(self) -> int:
        """Rows of the block."""
        return self.q1 - self.q0

    @property
    def num_keys(self) -> int:
        """Columns of the block."""
        return self.k1 - self.k0


@lru_cache(maxsize=256)
def attention_blocks(
    num_queries: int,
    num_keys: int,
    *,
    window: int | None = None,
    document_starts: tuple[int, ...] = (0,),
) -> tuple[Block, ...]:
    """Return the blocks of a span of ``num_queries`` that ends at key ``num_keys``.

    Args:
        num_queries: C, the tokens of the span.
        num_keys: T, the keys from the start of the sequence to the end of the span.
        window: Number of keys that a query sees, its own included; None for all.
        document_starts: Ascending positions where documents start; a query sees its own document
            only.
    """
    start = num_keys - num_queries
    blocks: list[Block] = []
    for first, last in documents_in_span(start, num_keys, document_starts):
        begin = max(start, first)
        if window is None or last - first <= window:
            blocks += _staircase(begin - start, last - start, key_offset=start, first_key=first)
        else:
            blocks += _bands(begin - start, last - start, start, first, window)
    return tuple(blocks)


@lru_cache(maxsize=16)  # short documents make thousands of blocks per entry
def cut_to_token_multiples(
    blocks: tuple[Block, ...], multiple: int, *, window: int | None
) -> tuple[Block, ...]:
    """Cut ``blocks`` into multiples of tokens and remainders that cover the same pairs once.

    A BAND block is not cut: a band that begins at the window's edge is extended by earlier keys,
    which its mask hides.

    Args:
        blocks: Blocks of a span.
        multiple: Number of tokens; rows and keys of most blocks become multiples of it.
        window: Number of keys that a query sees, its own included; None for all.
    """
    return tuple(part for block in blocks for part in _cut_block(block, multiple, window))


def _cut_block(block: Block, multiple: int, window: int | None) -> Iterator[Block]:
    if block.kind is BlockKind.BAND:
        missing = -block.num_keys % multiple
        first_query = block.k1 - block.num_queries
        ends_at_window = window is not None and block.k0 == first_query - window + 1
        yield replace(block, k0=block.k0 - missing * (ends_at_window and missing <= block.k0))
        return
    q = block.q1 - block.num_queries % multiple
    k = block.k1 - block.num_keys % multiple
    if block.kind is BlockKind.FULL:
        yield from _rectangle(block.q0, q, block.k0, k)
        yield from _remainder(block.q0, q, k, block.k1)
        yield from _remainder(q, block.q1, block.k0, block.k1)
        return
    if q > block.q0:
        yield replace(block, q1=q, k1=k)
        yield from _remainder(q, block.q1, block.k0, k)
    if block.q1 > q:
        yield replace(block, q0=q, k0=k)


def _remainder(q0: int, q1: int, k0: int, k1: int) -> Iterator[Block]:
    """Yield a rectangle in parts of at most MAX_REMAINDER_TOKENS rows and keys."""
    step = MAX_REMAINDER_TOKENS
    for q in range(q0, q1, step):
        for k in range(k0, k1, step):
            yield from _rectangle(q, min(q + step, q1), k, min(k + step, k1))


def _rectangle(q0: int, q1: int, k0: int, k1: int) -> Iterator[Block]:
    """Yield the FULL block of a rectangle, unless the rectangle is empty."""
    if q1 > q0 and k1 > k0:
        yield Block(BlockKind.FULL, q0, q1, k0, k1)


def documents_in_span(
    start: int, end: int, document_starts: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Yield (first key, end) of each document that has a query in ``[start, end)``."""
    edges = sorted({0, *document_starts, end})
    for first, last in zip(edges, edges[1:], strict=False):
        if last > start and first < end:
            yield first, min(last, end)


def _staircase(q0: int, q1: int, *, key_offset: int, first_key: int) -> list[Block]:
    """Return the blocks of one document without a window: the full prefix, then the diagonal."""
    last_key = key_offset + q0
    blocks = [
        Block(BlockKind.FULL, q0, q1, first, min(first + MAX_FULL_KEYS, last_key))
        for first in range(first_key, last_key, MAX_FULL_KEYS)
    ]
    return blocks + _triangle(q0, q1, key_offset)


def _triangle(q0: int, q1: int, key_offset: int) -> list[Block]:
    """Return the causal square of queries ``[q0, q1)``, halved until each half is small."""
    if q1 - q0 <= MAX_CAUSAL_TOKENS:
        return [Block(BlockKind.CAUSAL, q0, q1, key_offset + q0, key_offset + q1)]
    unit = max(1, min(HALF_TOKENS, MAX_CAUSAL_TOKENS // 2))
    middle = q0 + ceil((q1 - q0) // 2 / unit) * unit
    rectangle = Block(BlockKind.FULL, middle, q1, key_offset + q0, key_offset + middle)
    return [*_triangle(q0, middle, key_offset), rectangle, *_triangle(middle, q1, key_offset)]


def _bands(q0: int, q1: int, start: int, first_key: int, window: int) -> list[Block]:
    """Return the BAND blocks of queries ``[q0, q1)``, each with the keys in its window."""
    blocks = []
    for a in range(q0, q1, BAND_TILE_TOKENS):
        b = min(a + BAND_TILE_TOKENS, q1)
        first = max(first_key, start + a - window + 1)
        blocks.append(Block(BlockKind.BAND, a, b, first, start + b))
    return blocks
