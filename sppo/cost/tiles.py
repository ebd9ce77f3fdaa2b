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

TILE_BYTES = MIB
"""Most bytes of a tile of one fp32 operand of a chain of element-wise operations on a CPU."""
ACCUMULATION_TILE_BYTES = 8 * MIB
"""Most bytes of a tile of one fp32 operand of a single operation on a CPU."""
CAST_TILE = 256
"""Rows, columns and terms of a tile of a product that a CPU computes by casts to fp32."""

MAX_CAUSAL_TOKENS = 2048
"""Most rows of a causal square of attention. A larger one is halved: two half squares and a full
rectangle, which folds whole query groups. Limits from 1024 to 8192 measured alike on a CPU, within
its noise."""
HALF_TOKENS = 256
"""Multiple of tokens at which squares are halved, and divisor of the rows and the keys of every
backward that a CPU computes in half precision: tokens beyond it are at the end of a span only."""
MAX_FULL_KEYS = 8192
"""Most keys of a part of a prefix. Temporaries of a kernel are as long as its keys; if they grew
with every subsequence, an allocator could never reuse the freed ones."""
BAND_TILE_TOKENS = 512
"""Most rows of a band, which a sliding window makes."""
LEAST_PART_KEYS = 512
"""Fewest keys of a part of a rectangle whose keys are divided over the threads of a CPU, because it
has fewer heads than threads."""
MAX_BACKWARD_KEYS = 16384
"""Most keys of one backward call of a kernel of whole rectangles without a window."""
MAX_FORWARD_ELEMENTS = 1 << 30
"""Most elements of the keys of one forward call of such a kernel."""
SCORES_TILE_BYTES = 64 * MIB
"""Most bytes of one tile of scores of attention in plain torch operations."""

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
