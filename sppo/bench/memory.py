"""Check that the shapes a user requested fit into memory, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch

from sppo.bench.gemm import gemm_bytes
from sppo.kernels.native.machine_memory import memory_room
from sppo.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from sppo.bench.suite import Grids


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
    attention = grids.attention if "attention" in subjects and grids.attention.fixed else None
    gemm = grids.gemm if "gemm" in subjects and grids.gemm.fixed else None
    needs = [
        (shape.least_bytes, str(shape))
        for shapes in (attention.problems(dtypes) if attention else ())
        for shape in shapes
    ] + [
        (
            gemm_bytes(dtype, tokens=tokens, width=width),
            f"{dtype}, {format_tokens(tokens)} tokens through a layer of width {width}",
        )
        for dtype, tokens, width in (product(dtypes, gemm.tokens, gemm.widths) if gemm else ())
    ]
    size, what = max(needs, default=(0, ""))
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else memory_room().least_bytes
    if size > free:
        raise MemoryError(
            f"{what} take at least {format_bytes(size)}, and {format_bytes(free)} are free on the "
            f"{device}: ask for smaller shapes"
        )
