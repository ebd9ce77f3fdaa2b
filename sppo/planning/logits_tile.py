"""How many tokens' logits exist at once: the vocabulary projection works on tiles of tokens."""

from __future__ import annotations

from sppo.units import MIB

LOGITS_TILE_BYTES = 16 * MIB
"""Bound of one tile of fp32 logits."""
LEAST_TILE_TOKENS = 64
"""Tokens of a tile of logits, however large the vocabulary."""
_WIDE_BYTES = 4


def tile_tokens(vocab_size: int, *, tile_bytes: int = LOGITS_TILE_BYTES) -> int:
    """Tokens of a tile whose fp32 logits take about ``tile_bytes``."""
    return max(LEAST_TILE_TOKENS, tile_bytes // (_WIDE_BYTES * vocab_size))
