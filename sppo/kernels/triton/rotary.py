"""Rotary position embedding; each pair is read and written once.

Legend: C tokens, H heads, D head size, h heads of a tile, F = D/2 pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.triton.launch import on_device_of, row_major

_TILE_PAIRS = 1024


@triton.jit
def _turn_kernel(
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    num_heads,
    x_token,
    x_head,
    y_token,
    y_head,
    cos_token,
    sin_token,
    SIGN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair_F = tl.arange(0, BLOCK)
    cos_F = tl.load(cos_ptr + token * cos_token + pair_F, mask=pair_F < HALF, other=0.0)
    sin_F = tl.load(sin_ptr + token * sin_token + pair_F, mask=pair_F < HALF, other=0.0) * SIGN
    inside_hF = (head_h[:, None] < num_heads) & (pair_F[None, :] < HALF)
    x_hF = x_ptr + token * x_token + head_h[:, None] * x_head + pair_F[None, :]
    first_hF = tl.load(x_hF, mask=inside_hF, other=0.0).to(cos_F.dtype)
    second_hF = tl.load(x_hF + HALF, mask=inside_hF, other=0.0).to(cos_F.dtype)
    left_hF = first_hF * cos_F[None, :] - second_hF * sin_F[None, :]
    right_hF = second_hF * cos_F[None, :] + first_hF * sin_F[None, :]
    y_hF = y_ptr + token * y_token + head_h[:, None] * y_head + pair_F[None, :]
    tl.store(y_hF, left_hF.to(y_ptr.dtype.element_ty), mask=inside_hF)
    tl.store(y_hF + HALF, right_hF.to(y_ptr.dtype.element_ty), mask=inside_hF)


def turn(x_CHD: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    """Return ``x`` with each pair (i, i + D/2) rotated by ``sign`` times its token's angle.

    ``cos`` and ``sin`` are ``[C, 1, D/2]`` in fp32 or better, see
    :class:`sppo.kernels.rotary.RotaryTable`. The rotation is computed in the dtype of ``cos`` and
    returned in the dtype of ``x``.
    """
    x_CHD = row_major(x_CHD)
    y_CHD = torch.empty(x_CHD.shape, dtype=x_CHD.dtype, device=x_CHD.device)
    tokens, heads, head_size = x_CHD.shape
    cos, sin = row_major(cos), row_major(sin)
    block = triton.next_power_of_2(head_size // 2)
    of_tile = min(triton.next_power_of_2(heads), max(1, _TILE_PAIRS // block))
    with on_device_of(x_CHD):
        _turn_kernel[(tokens, triton.cdiv(heads, of_tile))](
            x_CHD,
            y_CHD,
            cos,
            sin,
            heads,
            *x_CHD.stride()[:2],
            *y_CHD.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            SIGN=sign,
            HALF=head_size // 2,
            BLOCK=block,
            HEADS=of_tile,
        )
    return y_CHD
