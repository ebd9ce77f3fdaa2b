"""Tile of a weight gradient in half precision before it joins its fp32 sum, on a CPU."""

from __future__ import annotations

from sppo.units import MIB

PRODUCT_TILE_BYTES = 2 * MIB
"""Bound of one tile of the product, where that leaves it enough rows to be fast."""
LEAST_PRODUCT_ROWS = 256


def product_rows(width: int, *, element_bytes: int) -> int:
    """Rows of ``width`` elements each that are multiplied at once."""
    return max(LEAST_PRODUCT_ROWS, PRODUCT_TILE_BYTES // (element_bytes * width))
