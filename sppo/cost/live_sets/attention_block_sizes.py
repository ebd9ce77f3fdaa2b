"""Sizes of the largest blocks into which attention is divided, by the rules of the block kernels.

The rules are those of :mod:`sppo.kernels.attention.blocks`.
"""

CAUSAL_TOKENS = 2048
"""Most rows of a causal square."""
PREFIX_KEYS = 8192
"""Most keys of a part of a prefix."""
BAND_ROWS = 512
"""Most rows of a band, which a sliding window makes."""
HALF_TOKENS = 256
"""Multiple of tokens at which squares are halved. In bf16, blocks of rows and keys that are no
multiples are computed in fp32 by :mod:`sppo.kernels.attention.cpu_flash`."""


def largest_square(rows: int) -> int:
    """Return the rows of the largest causal square, after halving those that are too large."""
    while rows > CAUSAL_TOKENS:
        first = first_half(rows)
        rows = max(first, rows - first)
    return rows


def first_half(rows: int) -> int:
    """Return the rows of the first half of a causal square."""
    return -(-(rows // 2) // HALF_TOKENS) * HALF_TOKENS
