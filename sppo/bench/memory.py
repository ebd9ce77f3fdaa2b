"""Check that the shapes a user requested fit into memory, before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from sppo.bench.attention_grid import AttentionGrid, AttentionShape
from sppo.bench.gemm import GemmGrid
from sppo.bench.operands import DTYPES
from sppo.kernels.native.machine_memory import memory_room
from sppo.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from sppo.bench.suite import Grids

_FP32 = torch.float32.itemsize


def check_memory(
    grids: Grids, *, subjects: Sequence[str], device: str, dtypes: Sequence[str]
) -> None:
    """Check that the operands and results of the largest requested shape fit into memory.

    Args:
        grids: Shapes to time; default shapes are not checked.
        subjects: Subjects to measure.
        device: "cpu" or "cuda".
        dtypes: Some of bf16 and fp32.

    Raises:
        MemoryError: A requested shape that does not fit.
    """
    shapes: list[tuple[int, str]] = []
    if "attention" in subjects and grids.attention.fixed:
        shapes += _attention(grids.attention, dtypes)
    if "gemm" in subjects and grids.gemm.fixed:
        shapes += _gemm(grids.gemm, dtypes)
    size, what = max(shapes, default=(0, ""))
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else memory_room().least_bytes
    if size > free:
        raise MemoryError(
            f"{what} take at least {format_bytes(size)}, and {format_bytes(free)} are free on the "
            f"{device}: ask for smaller shapes"
        )


def shape_bytes(shape: AttentionShape) -> int:
    """Return the bytes of q, k, v, o, do, dq, and the fp32 sums of dk and dv."""
    size = DTYPES[shape.dtype].itemsize
    queries = shape.queries * shape.heads.queries * shape.head_size
    keys = shape.keys * shape.heads.kv * shape.head_size
    return 4 * queries * size + 2 * keys * (size + _FP32)


def gemm_bytes(dtype: str, *, tokens: int, width: int) -> int:
    """Return the bytes of input, output gradient, weight, and fp32 sum of weight gradients."""
    size = DTYPES[dtype].itemsize
    return 2 * tokens * width * size + width * width * (size + _FP32)


def _attention(grid: AttentionGrid, dtypes: Sequence[str]) -> Iterator[tuple[int, str]]:
    for shapes in grid.problems(dtypes):
        for shape in shapes:
            yield shape_bytes(shape), str(shape)


def _gemm(grid: GemmGrid, dtypes: Sequence[str]) -> Iterator[tuple[int, str]]:
    for dtype in dtypes:
        for tokens in grid.tokens:
            for width in grid.widths:
                what = f"{dtype}, {format_tokens(tokens)} tokens through a layer of width {width}"
                yield gemm_bytes(dtype, tokens=tokens, width=width), what
