"""Rates of kernels by shape, interpolated between measured points or estimated analytically.

A kernel of b thread blocks on m multiprocessors runs in ceil(b / m) waves, of which the last is
half idle on average, so it reaches b / (b + m/2) of the rate of a very large kernel. The *analytic*
rate is this share times the fraction of the peak that large kernels reach. `sppo bench` measures
rates on a grid of shapes instead; between grid points, rates are interpolated on logarithmic axes,
and beyond them the nearest point holds. A measured rate includes all costs of a call, so fixed
costs such as waking threads show as lower rates of small shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Product = Literal["forward", "input", "weight"]
"""Matrix product of a linear layer: its output, the gradient of its input, or the gradient of its
weight added to the sum."""

BLOCK_TOKENS = 128
"""Rows of a thread block's tile, in matrix products and in attention."""
BLOCK_OUTPUTS = 128
"""Columns of a matrix product's tile."""
_CACHED_GRIDS = 256
_Point = TypeVar("_Point")


@dataclass(frozen=True, slots=True)
class GemmPoint:
    """Measured rates of the three products of a linear layer ``[tokens, width] x [width, width]``.

    Each product counts ``2 * tokens * width^2`` FLOPs; the time of the weight gradient includes
    adding it to its fp32 sum.
    """

    dtype: str
    tokens: int
    width: int
    forward_flops_per_s: float
    input_flops_per_s: float
    weight_flops_per_s: float

    def flops_per_s(self, product: Product) -> float:
        """Return the FLOPs per second of `product`."""
        rates = {
            "forward": self.forward_flops_per_s,
            "input": self.input_flops_per_s,
            "weight": self.weight_flops_per_s,
        }
        return rates[product]


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """Measured rates of attention of the last ``queries`` of ``keys`` positions over all keys.

    Rates are FLOPs per second over visible pairs; a backward counts 2.5 times the FLOPs of its
    forward.
    """

    dtype: str
    head_size: int
    queries: int
    keys: int
    forward_flops_per_s: float
    backward_flops_per_s: float


@dataclass(frozen=True, slots=True)
class ElementwisePoint:
    """Measured rate of an element-wise kernel on tensors of ``elements`` elements.

    The rate refers to the bytes that :mod:`sppo.cost.elementwise` counts, the minimum that the
    kernel must read and write, not to its actual traffic.
    """

    kernel: str
    dtype: str
    elements: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Values at the crossings of two rising axes."""

    rows: Floats
    columns: Floats
    values: Floats

    def at(self, row: Floats, column: Floats) -> Floats:
        """Return values at (row, column), interpolated in logarithms, constant beyond the ends."""
        low_r, share_r = _place(self.rows, row)
        low_c, share_c = _place(self.columns, column)
        high_r = np.minimum(low_r + 1, len(self.rows) - 1)
        high_c = np.minimum(low_c + 1, len(self.columns) - 1)
        logs = np.log(self.values)
        below = logs[low_r, low_c] * (1 - share_c) + logs[low_r, high_c] * share_c
        above = logs[high_r, low_c] * (1 - share_c) + logs[high_r, high_c] * share_c
        result: Floats = np.exp(below * (1 - share_r) + above * share_r)
        return result


def _place(axis: Floats, value: Floats) -> tuple[npt.NDArray[np.intp], Floats]:
    """Return the index of the axis point at or below ``value``, and the next point's weight."""
    clamped = np.clip(value, axis[0], axis[-1])
    low = np.clip(np.searchsorted(axis, clamped, side="right") - 1, 0, max(0, len(axis) - 2))
    if len(axis) == 1:
        return low, np.zeros_like(clamped)
    weight: Floats = np.log(clamped / axis[low]) / np.log(axis[low + 1] / axis[low])
    return low, weight


def wave_fill(blocks: Floats, *, num_multiprocessors: int) -> Floats:
    """Return the fraction of a very large kernel's rate that ``blocks`` thread blocks reach."""
    filled: Floats = blocks / (blocks + num_multiprocessors / 2)
    return filled


def gemm_blocks(tokens: Floats, *, outputs: float) -> Floats:
    """Return the thread blocks of a matrix product with ``tokens`` rows and ``outputs`` columns."""
    blocks: Floats = np.ceil(tokens / BLOCK_TOKENS) * np.ceil(outputs / BLOCK_OUTPUTS)
    return blocks


def attention_blocks(queries: Floats, *, heads: float) -> Floats:
    """Return the thread blocks of an attention forward, one per tile of queries and head."""
    blocks: Floats = np.ceil(queries / BLOCK_TOKENS) * heads
    return blocks


@dataclass(frozen=True, slots=True, eq=False)
class _Same(Generic[_Point]):
    """Cache key that compares measured points by identity, since hashing hundreds is slow."""

    points: tuple[_Point, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.points is other.points

    def __hash__(self) -> int:
        return id(self.points)


def gemm_grid(points: tuple[GemmPoint, ...], dtype: str, *, product: Product) -> Grid | None:
    """Return measured rates by (tokens, width), or None if ``dtype`` was not measured.

    Raises:
        ValueError: Points are missing from the grid, or a shape or rate is not above 0.
    """
    return _gemm_grid(_Same(points), dtype, product)


@lru_cache(maxsize=_CACHED_GRIDS)
def _gemm_grid(same: _Same[GemmPoint], dtype: str, product: Product) -> Grid | None:
    return _grid(
        [
            (point.tokens, point.width, point.flops_per_s(product))
            for point in same.points
            if point.dtype == dtype
        ],
        what=f"gemm_points of {dtype}",
        axes=("tokens", "width"),
    )


def attention_grids(
    points: tuple[AttentionPoint, ...], dtype: str, *, backward: bool
) -> Mapping[int, Grid]:
    """Return measured rates by (queries, keys / queries) for each head size, smallest first.

    The second axis is relative to the queries, so that every point of a grid can be measured.

    Raises:
        ValueError: Points are missing from a grid, or a shape or rate is not above 0.
    """
    return _attention_grids(_Same(points), dtype, backward)


@lru_cache(maxsize=_CACHED_GRIDS)
def _attention_grids(same: _Same[AttentionPoint], dtype: str, backward: bool) -> Mapping[int, Grid]:
    points, grids = same.points, {}
    for size in sorted({point.head_size for point in points if point.dtype == dtype}):
        grids[size] = _grid(
            [
                (
                    point.queries,
                    point.keys / point.queries,
                    point.backward_flops_per_s if backward else point.forward_flops_per_s,
                )
                for point in points
                if (point.dtype, point.head_size) == (dtype, size)
            ],
            what=f"attention_points of {dtype}, head size {size}",
            axes=("queries", "keys per query"),
        )
    return {size: grid for size, grid in grids.items() if grid is not None}


def attention_rates(
    grids: Mapping[int, Grid], *, head_size: float, queries: Floats, keys: Floats
) -> Floats:
    """Return rates of spans of ``queries`` tokens that end at ``keys``.

    Rates are interpolated between the nearest two head sizes. A span longer than any measured span
    is divided into parts of measured length: see :func:`typical_keys`.
    """
    sizes = np.array(list(grids), dtype=np.float64)
    low, weight = _place(sizes, np.array(head_size, dtype=np.float64))
    names = list(grids)
    near = (names[int(low)], names[min(int(low) + 1, len(names) - 1)])
    below, above = (_span_rates(grids[name], queries=queries, keys=keys) for name in near)
    rates: Floats = below ** (1 - weight) * above**weight
    return rates


def _span_rates(grid: Grid, *, queries: Floats, keys: Floats) -> Floats:
    part = np.clip(queries, grid.rows[0], grid.rows[-1])
    return grid.at(part, typical_keys(queries, keys=keys, part=part) / part)


def typical_keys(queries: Floats, *, keys: Floats, part: Floats) -> Floats:
    """Return the mean number of keys that the parts of a span see, weighted by visible pairs.

    Of n parts of q queries after a prefix of a keys, part j sees a + j q keys and has
    q (a + (j - 1/2) q) visible pairs. The sums over j have closed forms, which are used here.

    Args:
        queries: Tokens of each span.
        keys: Tokens of the sequence up to the end of each span.
        part: Tokens of each part.
    """
    n = np.maximum(queries / part, 1.0)
    a = np.maximum(keys - np.maximum(queries, part), 0.0)
    pairs = n * a + part * n**2 / 2
    squares = n * a**2 + a * part * n**2 + part**2 * (n**3 / 3 - n / 12)
    typical: Floats = squares / pairs + part / 2
    return typical


def elementwise_grid(
    points: tuple[ElementwisePoint, ...], dtype: str, *, kernel: str
) -> Grid | None:
    """Return measured rates of ``kernel`` by number of elements, or None if it was not measured.

    Raises:
        ValueError: A size or rate is not above 0.
    """
    return _elementwise_grid(_Same(points), dtype, kernel)


@lru_cache(maxsize=_CACHED_GRIDS)
def _elementwise_grid(same: _Same[ElementwisePoint], dtype: str, kernel: str) -> Grid | None:
    return _grid(
        [
            (point.elements, 1, point.bytes_per_s)
            for point in same.points
            if (point.kernel, point.dtype) == (kernel, dtype)
        ],
        what=f"elementwise_points of {kernel} in {dtype}",
        axes=("elements", "column"),
    )


def _grid(
    points: Sequence[tuple[float, float, float]], *, what: str, axes: tuple[str, str]
) -> Grid | None:
    if not points:
        return None
    rows = sorted({row for row, _, _ in points})
    columns = sorted({column for _, column, _ in points})
    by_place = {(row, column): value for row, column, value in points}
    missing = [(r, c) for r in rows for c in columns if (r, c) not in by_place]
    if missing:
        raise ValueError(
            f"{what}: nothing measured at {axes[0]} {missing[0][0]:g}, {axes[1]} "
            f"{missing[0][1]:g}; a grid needs every crossing, measure again with sppo bench"
        )
    if min(rows) <= 0 or min(columns) <= 0 or min(by_place.values()) <= 0:
        raise ValueError(f"{what}: shapes and rates must be above 0")
    values = np.array([[by_place[row, column] for column in columns] for row in rows])
    return Grid(np.array(rows, dtype=float), np.array(columns, dtype=float), values)
