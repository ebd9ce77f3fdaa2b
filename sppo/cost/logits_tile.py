"""Tokens whose logits exist at once: the vocabulary projection works on tiles of tokens.

Every tile reads the projection and reads and writes its fp32 gradient, ``V x E`` each. On a GPU a
tile has to be so long that its products take longer than that: 6 E V t FLOPs over 12 E V bytes are
t / 2 per byte, and 200 to 300 FLOPs take as long as one byte. A CPU asks for far less, and its
memory is what people count.
"""

from __future__ import annotations

from sppo.units import MIB

LOGITS_TILE_BYTES = {"cpu": 48 * MIB, "cuda": 256 * MIB}
"""Bound of one tile of logits, by kind of device."""
LEAST_TILE_TOKENS = 64
"""Tokens of a tile of logits, however large the vocabulary."""
PRODUCT_TOKENS = {"cpu": 1, "cuda": 256}
"""Tokens in whole multiples of which a tile is cut, where it has that many: a GPU multiplies tiles
of 128 or 256 rows, and takes as long for one that is not full."""


def tile_tokens(
    vocab_size: int, *, element_bytes: int, device: str = "cpu", tile_bytes: int | None = None
) -> int:
    """Tokens of a tile of logits, at most; those of a subsequence that remain are one more tile.

    Args:
        vocab_size: logits of a token.
        element_bytes: of one logit; they have the dtype of the activations.
        device: "cpu" or "cuda".
        tile_bytes: bound of the tile; None for the device's.
    """
    bound = LOGITS_TILE_BYTES[device] if tile_bytes is None else tile_bytes
    tokens, multiple = bound // (element_bytes * vocab_size), PRODUCT_TOKENS[device]
    return max(LEAST_TILE_TOKENS, tokens - tokens % multiple if tokens >= multiple else tokens)
