"""Rates of kernels by shape, interpolated between measured points or estimated analytically.

A kernel of b thread blocks on m multiprocessors runs in ceil(b / m) waves, of which the last is
half idle on average, so it reaches b / (b + m/2) of the rate of a very large kernel. The *analytic*
rate is this share times the fraction of the peak that large kernels reach. `sppo bench` measures
rates on a grid of shapes instead; between grid points, rates are interpolated on logarithmic axes,
and beyond them the nearest point holds. A measured rate includes all costs of a call, so fixed
costs such as waking threads show as lower rates of small shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from pydantic import Field

Floats = npt.NDArray[np.float64]
FlopsPerS = Annotated[float, Field(ge=1e-3, le=1e18)]
"""FLOPs per second in a hardware description, at most a hundred times those of the fastest GPU."""
BytesPerS = Annotated[float, Field(ge=1e-3, le=1e15)]
"""Bytes per second in a hardware description, at most a hundred times those of the fastest GPU."""
Size = Annotated[int, Field(ge=1, le=1 << 48)]
"""Number of tokens, columns or elements of a measured kernel."""
Product = Literal["forward", "input", "weight"]
"""Matrix product of a linear layer: its output, the gradient of its input, or the gradient of its
weight added to the sum."""

_P = TypeVar("_P")
_K = TypeVar("_K", str, tuple[str, int], tuple[str, str])

BLOCK_TOKENS = 128
"""Rows of a thread block's tile, in matrix products and in attention."""
BLOCK_OUTPUTS = 128
"""Columns of a matrix product's tile."""


@dataclass(frozen=True, slots=True)
class GemmPoint:
    """Measured rates of the three products of a linear layer ``[tokens, width] x [width, width]``.

    Each product counts ``2 * tokens * width^2`` FLOPs; the time of the weight gradient includes
    adding it to its fp32 sum.
    """

    dtype: str
    tokens: Size
    width: Size
    forward_flops_per_s: FlopsPerS
    input_flops_per_s: FlopsPerS
    weight_flops_per_s: FlopsPerS

    def flops_per_s(self, product: Product) -> float:
        """Return the FLOPs per second of `product`."""
        rate: float = getattr(self, f"{product}_flops_per_s")
        return rate


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """Measured rates of attention of the last ``queries`` of ``keys`` positions over all keys.

    Rates are FLOPs per second over visible pairs; a backward counts 2.5 times the FLOPs of its
    forward.
    """

    dtype: str
    head_size: Size
    queries: Size
    keys: Size
    forward_flops_per_s: FlopsPerS
    backward_flops_per_s: FlopsPerS


@dataclass(frozen=True, slots=True)
class ElementwisePoint:
    """Measured rate of an element-wise kernel on tensors of ``elements`` elements.

    The rate refers to the bytes that :mod:`sppo.cost.elementwise` counts, the minimum that the
    kernel must read and write, not to its actual traffic.
    """

    kernel: str
    dtype: str
    elements: Size
    bytes_per_s: BytesPerS


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Values at the crossings of two rising axes."""

    rows: Floats
    columns: Floats
    values: Floats

    def at(self, row: Floats, column: Floats) -> Floats:
        """Return values at (row, column), interpolated in logarithms, constant beyond the ends."""
        low_r, share_r = place(self.rows, row)
        low_c, share_c = place(self.columns, column)
        high_r = np.minimum(low_r + 1, len(self.rows) - 1)
        high_c = np.minimum(low_c + 1, len(self.columns) - 1)
        logs = np.log(self.values)
        below = logs[low_r, low_c] * (1 - share_c) + logs[low_r, high_c] * share_c
        above = logs[high_r, low_c] * (1 - share_c) + logs[high_r, high_c] * share_c
        result: Floats = np.exp(below * (1 - share_r) + above * share_r)
        return result


def place(axis: Floats, value: Floats) -> tuple[npt.NDArray[np.intp], Floats]:
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


def gemm_grids(points: Sequence[GemmPoint]) -> Mapping[tuple[str, Product], Grid]:
    """Return measured rates by (tokens, width), for each type and product.

    Raises:
        ValueError: Points are missing from a grid.
    """
    products: tuple[Product, ...] = get_args(Product)
    return {
        (dtype, product): _grid(
            [(p.tokens, p.width, p.flops_per_s(product)) for p in of_dtype],
            what=f"gemm_points of {dtype}",
            axes=("tokens", "width"),
        )
        for dtype, of_dtype in _by(points, lambda point: point.dtype).items()
        for product in products
    }


def attention_grids(
    points: Sequence[AttentionPoint],
) -> Mapping[tuple[str, bool], Mapping[int, Grid]]:
    """Return measured rates by (queries, keys / queries) for each head size, smallest first.

    The second axis is relative to the queries, so that every point of a grid can be measured.

    Returns:
        Grids by head size, by type and whether the rates are of the backward.

    Raises:
        ValueError: Points are missing from a grid.
    """
    grids: dict[tuple[str, bool], dict[int, Grid]] = {}
    for (dtype, size), own in _by(points, lambda point: (point.dtype, point.head_size)).items():
        for backward in (False, True):
            rates = [p.backward_flops_per_s if backward else p.forward_flops_per_s for p in own]
            grids.setdefault((dtype, backward), {})[size] = _grid(
                [(p.queries, p.keys / p.queries, rate) for p, rate in zip(own, rates, strict=True)],
                what=f"attention_points of {dtype}, head size {size}",
                axes=("queries", "keys per query"),
            )
    return grids


def attention_rates(
    grids: Mapping[int, Grid], *, head_size: float, queries: Floats, keys: Floats
) -> Floats:
    """Return rates of spans of ``queries`` tokens that end at ``keys``.

    Rates are interpolated between the nearest two head sizes. A span longer than any measured span
    is divided into parts of measured length: see :func:`typical_keys`.
    """
    sizes = list(grids)
    low, weight = place(np.array(sizes, dtype=np.float64), np.array(float(head_size)))
    near = (sizes[int(low)], sizes[min(int(low) + 1, len(sizes) - 1)])
    below, above = (_span_rates(grids[size], queries=queries, keys=keys) for size in near)
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


def elementwise_grids(points: Sequence[ElementwisePoint]) -> Mapping[tuple[str, str], Grid]:
    """Return measured rates by number of elements, for each kernel and type."""
    return {
        (kernel, dtype): _grid(
            [(point.elements, 1, point.bytes_per_s) for point in own],
            what=f"elementwise_points of {kernel} in {dtype}",
            axes=("elements", "column"),
        )
        for (kernel, dtype), own in _by(points, lambda p: (p.kernel, p.dtype)).items()
    }


def _by(points: Sequence[_P], key: Callable[[_P], _K]) -> Mapping[_K, list[_P]]:
    """Return the points by key, in ascending order of keys."""
    found: dict[_K, list[_P]] = {}
    for point in points:
        found.setdefault(key(point), []).append(point)
    return dict(sorted(found.items()))


def _grid(
    points: Sequence[tuple[float, float, float]], *, what: str, axes: tuple[str, str]
) -> Grid:
    rows = sorted({row for row, _, _ in points})
    columns = sorted({column for _, column, _ in points})
    by_place = {(row, column): value for row, column, value in points}
    missing = [(r, c) for r in rows for c in columns if (r, c) not in by_place]
    if missing:
        raise ValueError(
            f"{what}: nothing measured at {axes[0]} {missing[0][0]:g}, {axes[1]} "
            f"{missing[0][1]:g}; a grid needs every crossing, measure again with sppo bench"
        )
    values = np.array([[by_place[row, column] for column in columns] for row in rows])
    return Grid(np.array(rows, dtype=float), np.array(columns, dtype=float), values)
