"""Rates of kernels by shape, interpolated between measured points or estimated analytically.

A kernel of b thread blocks on m multiprocessors runs in ceil(b / m) waves, of which the last is
half idle on average, so it reaches b / (b + m/2) of the rate of a very large kernel. The *analytic*
rate is this share times the fraction of the peak that large kernels reach. `sppo bench` measures
rates on a grid of shapes instead; between grid points, rates are interpolated on logarithmic axes,
and beyond them the nearest point holds. A measured rate includes all costs of a call, so fixed
costs such as waking threads show as lower rates of small shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Annotated, Any, Literal

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

BLOCK_TOKENS = 128
"""Rows of a thread block's tile, in matrix products and in attention."""
BLOCK_OUTPUTS = 128
"""Columns of a matrix product's tile."""
PUBLISHED_BLOCKS = 2048
"""Thread blocks of the published measurements of attention: 16Ki tokens and 16 heads of 128 in all
(FlashAttention-2, section 4.1)."""


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

    @property
    def keys_per_query(self) -> float:
        """Keys relative to queries, so that every point of a grid can be measured."""
        return self.keys / self.queries


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


@dataclass(frozen=True, slots=True)
class PublishedAttention:
    """Published rates of one attention back end on one kind of device at one head size.

    Figures are for bf16 (or fp16) and a causal sequence of the given length, in FLOPs per second
    over visible pairs; a backward counts 2.5 times the FLOPs of its forward.

    Attributes:
        backend: Name of the back end in :mod:`sppo.kernels.attention.choice`.
        head_size: Elements of a head.
        lengths: Tokens of each measured causal sequence, rising.
        forward_flops_per_s: Rate of the forward at each length.
        backward_flops_per_s: Rate of the backward at each length.
        source: Publication of the rates, and the hardware that they were measured on.
    """

    backend: str
    head_size: Size
    lengths: tuple[Size, ...]
    forward_flops_per_s: tuple[FlopsPerS, ...]
    backward_flops_per_s: tuple[FlopsPerS, ...]
    source: str

    def __post_init__(self) -> None:
        counts = {len(self.lengths), len(self.forward_flops_per_s), len(self.backward_flops_per_s)}
        if counts == {0} or len(counts) > 1 or [*self.lengths] != sorted({*self.lengths}):
            raise ValueError(
                f"published_attention of {self.backend}, head size {self.head_size}: one rate for "
                "each length, lengths rising"
            )

    def grid(self, *, backward: bool) -> Grid:
        """Return the rates of one pass by length."""
        rates = self.backward_flops_per_s if backward else self.forward_flops_per_s
        return Grid(self.lengths, (1,), np.array(rates)[:, None])


class Grid:
    """Values at the crossings of two rising axes."""

    def __init__(self, rows: Sequence[float], columns: Sequence[float], values: Floats) -> None:
        self.rows, self.columns = np.array(rows, dtype=float), np.array(columns, dtype=float)
        self._logs = np.log(values)

    def at(self, row: Floats, column: Floats) -> Floats:
        """Return values at (row, column), interpolated in logarithms, constant beyond the ends."""
        low_r, share_r = place(self.rows, row)
        low_c, share_c = place(self.columns, column)
        high_r = np.minimum(low_r + 1, len(self.rows) - 1)
        high_c = np.minimum(low_c + 1, len(self.columns) - 1)
        logs = self._logs
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


GRIDS = {
    "gemm_points": (("dtype",), ("tokens", "width")),
    "attention_points": (("dtype", "head_size"), ("queries", "keys_per_query")),
    "elementwise_points": (("kernel", "dtype"), ("elements",)),
}
"""Attributes of points that say what a grid is of, and one or two that are its axes, by the name of
the points in a hardware description."""


def rate_grids(
    name: str, points: Iterable[GemmPoint | AttentionPoint | ElementwisePoint]
) -> Mapping[tuple[Any, ...], Grid]:
    """Return the measured rates of points by shape, in ascending order of their keys.

    Args:
        name: Name of the points in :data:`GRIDS`.
        points: Points of that name.

    Returns:
        Grids by the keys of their points and the name of the rate, e.g. "forward_flops_per_s".

    Raises:
        ValueError: Points are missing from a grid.
    """
    keys, axes = GRIDS[name]
    found: dict[tuple[Any, ...], dict[tuple[float, float], float]] = {}
    for point in points:
        key = tuple(getattr(point, attribute) for attribute in keys)
        row, column, *_ = (*(getattr(point, axis) for axis in axes), 1)
        for rate in (field.name for field in fields(point) if field.name.endswith("_per_s")):
            found.setdefault((*key, rate), {})[row, column] = getattr(point, rate)
    grids = {}
    for key, rates in sorted(found.items()):
        rows, columns = (sorted(set(axis)) for axis in zip(*rates, strict=True))
        missing = [place for place in product(rows, columns) if place not in rates]
        if missing:
            of = _named(keys, key[:-1])
            raise ValueError(
                f"{name} of {of}: nothing measured at {_named(axes, missing[0])}; a grid needs "
                "every crossing, measure again with sppo bench"
            )
        values = np.array([[rates[row, column] for column in columns] for row in rows])
        grids[key] = Grid(rows, columns, values)
    return grids


def _named(attributes: tuple[str, ...], values: Iterable[Any]) -> str:
    """Return values with the names of their attributes, e.g. ``tokens 256, width 512``."""
    names = (attribute.replace("_", " ") for attribute in attributes)
    pairs = zip(names, values, strict=False)
    return ", ".join(f"{n} {v if isinstance(v, str) else f'{v:g}'}" for n, v in pairs)


def attention_rates(
    grids: Mapping[int, Grid], *, head_size: float, queries: Floats, keys: Floats
) -> Floats:
    """Return measured rates of spans of ``queries`` tokens that end at ``keys``.

    A span longer than any measured span is divided into parts of measured length: see
    :func:`typical_keys`.
    """

    def of_size(grid: Grid) -> Floats:
        part = np.clip(queries, grid.rows[0], grid.rows[-1])
        return grid.at(part, typical_keys(queries, keys=keys, part=part) / part)

    return _between_head_sizes(grids, head_size, of_size)


def published_rates(
    grids: Mapping[int, Grid], *, head_size: float, queries: Floats, keys: Floats
) -> Floats:
    """Return published rates of spans of ``queries`` tokens that end at ``keys``.

    A span after a prefix has the rate of the causal sequence whose queries see as many keys on
    average.
    """
    lengths = 2 * keys - queries
    return _between_head_sizes(
        grids, head_size, lambda grid: grid.at(lengths, np.ones_like(lengths))
    )


def _between_head_sizes(
    grids: Mapping[int, Grid], head_size: float, rates_of: Callable[[Grid], Floats]
) -> Floats:
    """Return rates interpolated between those of the nearest two head sizes.

    Args:
        grids: Grid of each head size, smallest first.
        head_size: Elements of a head.
        rates_of: Function that returns the rates of a grid.
    """
    sizes = list(grids)
    low, weight = place(np.array(sizes, dtype=np.float64), np.array(float(head_size)))
    near = (sizes[int(low)], sizes[min(int(low) + 1, len(sizes) - 1)])
    below, above = (rates_of(grids[size]) for size in near)
    rates: Floats = below ** (1 - weight) * above**weight
    return rates


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
