"""Size of the half-precision tiles of a weight gradient that a CPU adds to its fp32 sum."""

from __future__ import annotations

from sppo.units import MIB

PRODUCT_TILE_BYTES = 2 * MIB
"""Upper bound of the bytes of one tile, unless the tile then has too few rows to be fast."""
LEAST_PRODUCT_ROWS = 256


def product_rows(width: int, *, element_bytes: int) -> int:
    """Return the rows of ``width`` elements that one tile of a product has."""
    return max(LEAST_PRODUCT_ROWS, PRODUCT_TILE_BYTES // (element_bytes * width))
