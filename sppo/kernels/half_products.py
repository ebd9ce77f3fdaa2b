"""Products of half-precision matrices on CPUs that lack instructions for half precision.

oneDNN multiplies bf16 on CPUs with AVX-512, and fp16 on fewer CPUs. On other CPUs torch falls back
to plain loops: measured on an AVX2 machine with one thread, 8 GFLOP/s if the second operand is
transposed and 0.3 if not, compared to 50 in fp32. On such CPUs the functions of this module cast
operands tile by tile to fp32, in which products of two half-precision numbers are exact, and round
each result once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from sppo.cost.tiles import CAST_TILE


def needs_casts(x: Tensor) -> bool:
    """Return whether products with ``x`` must be computed by casts to fp32, tile by tile."""
    return x.device.type == "cpu" and not cpu_multiplies(x.dtype)


@cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return whether this CPU has fast products of matrices of ``dtype``."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def product_by_casts(
    left_MK: Tensor, right_KN: Tensor, *, into_MN: Tensor, bias_N: Tensor | None = None
) -> Tensor:
    """Write ``left @ right + bias`` to ``into_MN``, rounded once, and return ``into_MN``."""
    for rows in _tiles(into_MN.shape[0]):
        for columns in _tiles(into_MN.shape[1]):
            tile = into_MN[rows, columns]
            sum_mn = torch.zeros(tile.shape, dtype=torch.float32)
            if bias_N is not None:
                sum_mn += bias_N[columns]
            tile.copy_(_add_terms(sum_mn, left_MK[rows], right_KN[:, columns]))
    return into_MN


def add_product_by_casts(total_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Add ``left @ right`` to ``total_MN``, rounded once unless it is fp32; return ``total_MN``."""
    for rows in _tiles(total_MN.shape[0]):
        for columns in _tiles(total_MN.shape[1]):
            tile = total_MN[rows, columns]
            # float() returns the tile itself for an fp32 total, a copy for another dtype.
            sum_mn = _add_terms(tile.float(), left_MK[rows], right_KN[:, columns])
            if sum_mn.dtype != tile.dtype:
                tile.copy_(sum_mn)
    return total_MN


def _add_terms(sum_mn: Tensor, left_mK: Tensor, right_Kn: Tensor) -> Tensor:
    """Add ``left @ right`` of a tile to its fp32 sum, some terms at a time; return the sum."""
    for terms in _tiles(left_mK.shape[1]):
        sum_mn.addmm_(left_mK[:, terms].float(), right_Kn[terms].float())
    return sum_mn


def _tiles(size: int) -> Iterator[slice]:
    return (slice(start, min(start + CAST_TILE, size)) for start in range(0, size, CAST_TILE))
