"""Tiles of rows for chains of element-wise operations on a CPU.

Torch materialises every step of such a chain, and casts whole operands where dtypes mix. Taken tile
by tile, those temporaries stay in the cache, and none is as long as the subsequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from sppo.units import MIB

TILE_BYTES = MIB
"""Of one fp32 operand."""

_WIDE_BYTES = 4


def row_tiles(x: Tensor) -> Iterator[slice]:
    """Slices of the first dimension that tile ``x``; one slice on any other device than a CPU."""
    rows = x.shape[0]
    step = rows if x.device.type != "cpu" else rows_of_tile(x.numel() // max(1, rows))
    for start in range(0, rows, max(1, step)):
        yield slice(start, min(start + step, rows))


def head_tiles(x_HtD: Tensor) -> Iterator[tuple[int | slice, slice]]:
    """Indices that tile ``x``: some heads, or some rows of one where a head is more than a tile."""
    heads, rows, size = x_HtD.shape
    if x_HtD.device.type != "cpu" or rows <= rows_of_tile(size):
        yield from ((of_heads, slice(None)) for of_heads in row_tiles(x_HtD))
        return
    for head in range(heads):
        yield from ((head, of_rows) for of_rows in row_tiles(x_HtD[head]))


def rows_of_tile(row_elements: int) -> int:
    """Rows of ``row_elements`` each that one tile holds, at least one."""
    return max(1, TILE_BYTES // (_WIDE_BYTES * max(1, row_elements)))
