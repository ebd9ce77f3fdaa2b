"""Sizes of the tiles on which the vocabulary projection, experts and others work.

Every tile of tokens reads the vocabulary projection and reads and writes its fp32 gradient,
``V x E`` each. On a GPU a tile of t tokens must be long enough for its products to take longer than
this traffic: 6 E V t FLOPs over 12 E V bytes are t / 2 FLOPs per byte, and 200 to 300 FLOPs take as
long as one byte. A CPU needs far shorter tiles, which also save memory. It adds weight gradients in
half precision to their fp32 sums in tiles of rows.
"""

from __future__ import annotations

from sppo.config.model import Experts
from sppo.units import MIB

LOGITS_TILE_BYTES = {"cpu": 48 * MIB, "cuda": 256 * MIB}
"""Upper bound of the bytes of one tile of logits, by kind of device."""
LEAST_TILE_TOKENS = 64
"""Least tokens of a tile of logits, however large the vocabulary."""
PRODUCT_TOKENS = {"cpu": 1, "cuda": 256}
"""Multiple to which the tokens of a tile are rounded down, by kind of device, if there are as many.

GPU products work on 128 or 256 rows at a time, and partly filled rows take as long as full ones."""
PRODUCT_TILE_BYTES = 2 * MIB
"""Upper bound of the bytes of one tile of a weight gradient, unless the tile then has too few rows
to be fast."""
LEAST_PRODUCT_ROWS = 256
EXPERT_ROWS = {"cpu": 256, "cuda": 1024}
"""Rows of each expert in a tile of tokens that experts share evenly, by kind of device.

Every tile reads the weights of all experts, and reads and writes their fp32 gradients: r rows are
6 r FLOPs for 14 bytes of a weight in half precision, beside which the products must take longer."""

CHUNK_TOKENS = 64
"""Tokens of a chunk of the gated delta rule of linear attention."""
RECURRENCE_TOKENS = 2048
"""Tokens whose temporary tensors of linear attention are in memory at one time."""


def tile_tokens(
    vocab_size: int, *, element_bytes: int, device: str = "cpu", tile_bytes: int | None = None
) -> int:
    """Return the tokens of a tile of logits; the last tile of a subsequence may have fewer.

    Args:
        vocab_size: Logits per token.
        element_bytes: Bytes of one logit, which has the dtype of the activations.
        device: "cpu" or "cuda".
        tile_bytes: Upper bound of the bytes of a tile; None for the device's default.
    """
    bound = LOGITS_TILE_BYTES[device] if tile_bytes is None else tile_bytes
    tokens, multiple = bound // (element_bytes * vocab_size), PRODUCT_TOKENS[device]
    return max(LEAST_TILE_TOKENS, tokens - tokens % multiple if tokens >= multiple else tokens)


def expert_tile_tokens(experts: Experts, *, device: str) -> int:
    """Return the tokens that pass through the experts of a layer at once.

    Args:
        experts: Experts of the layer.
        device: "cpu" or "cuda".
    """
    return -(-EXPERT_ROWS[device] * experts.count // experts.per_token)


def product_rows(width: int, *, element_bytes: int) -> int:
    """Return the rows of ``width`` elements that one tile of a weight gradient has."""
    return max(LEAST_PRODUCT_ROWS, PRODUCT_TILE_BYTES // (element_bytes * width))
