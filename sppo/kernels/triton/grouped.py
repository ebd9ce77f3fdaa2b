"""Weight gradients of the experts of a layer: fp32 products added in place, in one kernel.

Legend: R rows sorted by expert, X experts, O outputs, I inputs; r, o, i elements of a tile.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.triton.launch import accumulation_type, on_device_of, row_major

_LEAST, _MOST = 16, 128
"""Least and most outputs and inputs of a tile."""
_ROW_BYTES = 128
"""Bytes of the rows of a tile, per column: three pairs of tiles fit into shared memory."""


@triton.jit
def _grouped_product_kernel(
    total_ptr,
    dy_ptr,
    x_ptr,
    offsets_ptr,
    outputs,
    inputs,
    dy_stride,
    x_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Add the product of the rows of one expert to one tile of its sum."""
    expert = tl.program_id(1).to(tl.int64)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    if begin < end:
        across = tl.cdiv(inputs, BLOCK_I)
        index_o = (tl.program_id(0) // across).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
        index_i = (tl.program_id(0) % across).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
        inside_o, inside_i = index_o < outputs, index_i < inputs
        sum_oi = tl.zeros((BLOCK_O, BLOCK_I), dtype=ACC_DTYPE)
        for start in range(begin, end, BLOCK_R):
            index_r = start + tl.arange(0, BLOCK_R)
            inside_r = (index_r < end)[:, None]
            row_r = index_r.to(tl.int64)[:, None]
            dy_ro = tl.load(
                dy_ptr + row_r * dy_stride + index_o[None, :],
                mask=inside_r & inside_o[None, :],
                other=0.0,
            )
            x_ri = tl.load(
                x_ptr + row_r * x_stride + index_i[None, :],
                mask=inside_r & inside_i[None, :],
                other=0.0,
            )
            sum_oi = tl.dot(
                tl.trans(dy_ro), x_ri, sum_oi, input_precision="ieee", out_dtype=ACC_DTYPE
            )
        tile_oi = total_ptr + (expert * outputs + index_o)[:, None] * inputs + index_i[None, :]
        inside_oi = inside_o[:, None] & inside_i[None, :]
        tl.store(tile_oi, tl.load(tile_oi, mask=inside_oi) + sum_oi, mask=inside_oi)


def add_grouped_products_(
    total_XOI: Tensor, dy_RO: Tensor, x_RI: Tensor, offsets_X: Tensor
) -> None:
    """Compute :func:`sppo.kernels.grouped.accumulate_grouped_weight_gradient_`."""
    assert total_XOI.is_contiguous(), "what is written in place cannot be copied first"
    dy, x = row_major(dy_RO), row_major(x_RI)
    experts, outputs, inputs = total_XOI.shape
    block_o, block_i = _block(outputs), _block(inputs)
    with on_device_of(x):
        kernel: Any = _grouped_product_kernel
        kernel[(triton.cdiv(outputs, block_o) * triton.cdiv(inputs, block_i), experts)](
            total_XOI,
            dy,
            x,
            offsets_X,
            outputs,
            inputs,
            dy.stride(0),
            x.stride(0),
            BLOCK_R=_ROW_BYTES // x.element_size(),
            BLOCK_O=block_o,
            BLOCK_I=block_i,
            ACC_DTYPE=accumulation_type(x.dtype),
            num_warps=8,
        )


def _block(size: int) -> int:
    """Return the outputs or inputs of a tile, a power of two."""
    return int(min(_MOST, max(_LEAST, triton.next_power_of_2(size))))
