"""Tiles of rows for chains of element-wise operations on a CPU.

Torch materialises every step of such a chain, and casts whole operands if dtypes differ. Computed
tile by tile, these temporaries stay in the cache, and none is as long as the subsequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from sppo.cost.tiles import ACCUMULATION_TILE_BYTES, TILE_BYTES

_ACCUMULATION_BYTES = 4


def row_tiles(x: Tensor) -> Iterator[slice]:
    """Yield slices of the first dimension that tile ``x``; a single slice unless on a CPU."""
    rows = x.shape[0]
    step = rows
    if rows and x.device.type == "cpu":
        step = TILE_BYTES // (_ACCUMULATION_BYTES * max(1, x.numel() // rows))
    for start in range(0, rows, max(1, step)):
        yield slice(start, min(start + step, rows))


def accumulation_tiles(x: Tensor) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices of leading dimensions that tile ``x``, for a single operation.

    Tiles have up to ACCUMULATION_TILE_BYTES: they need not stay in the cache, and waking the
    threads takes as long as processing a MiB. Yields a single index unless ``x`` is on a CPU.
    """
    rows = x.shape[0]
    fitting = (
        rows
        if x.device.type != "cpu"
        else ACCUMULATION_TILE_BYTES // (_ACCUMULATION_BYTES * x[0].numel())
    )
    if fitting == 0 and x.dim() > 1:
        yield from ((row, *rest) for row in range(rows) for rest in accumulation_tiles(x[row]))
        return
    step = max(1, fitting)
    for start in range(0, rows, step):
        yield (slice(start, min(start + step, rows)),)
