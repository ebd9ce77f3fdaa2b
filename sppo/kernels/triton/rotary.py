"""Rotary position embedding; each pair, and what is not rotated, is read and written once.

Legend: C tokens, H heads, D head size, h heads of a tile, P pairs, R = D - 2P dimensions that are
not rotated.
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
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair_P = tl.arange(0, BLOCK)
    cos_P = tl.load(cos_ptr + token * cos_token + pair_P, mask=pair_P < PAIRS, other=0.0)
    sin_P = tl.load(sin_ptr + token * sin_token + pair_P, mask=pair_P < PAIRS, other=0.0) * SIGN
    inside_hP = (head_h[:, None] < num_heads) & (pair_P[None, :] < PAIRS)
    x_hP = x_ptr + token * x_token + head_h[:, None] * x_head + pair_P[None, :]
    first_hP = tl.load(x_hP, mask=inside_hP, other=0.0).to(cos_P.dtype)
    second_hP = tl.load(x_hP + PAIRS, mask=inside_hP, other=0.0).to(cos_P.dtype)
    left_hP = first_hP * cos_P[None, :] - second_hP * sin_P[None, :]
    right_hP = second_hP * cos_P[None, :] + first_hP * sin_P[None, :]
    y_hP = y_ptr + token * y_token + head_h[:, None] * y_head + pair_P[None, :]
    tl.store(y_hP, left_hP.to(y_ptr.dtype.element_ty), mask=inside_hP)
    tl.store(y_hP + PAIRS, right_hP.to(y_ptr.dtype.element_ty), mask=inside_hP)
    if REST > 0:
        rest_R = tl.arange(0, REST_BLOCK)
        inside_hR = (head_h[:, None] < num_heads) & (rest_R[None, :] < REST)
        of_head_hR = head_h[:, None] * x_head + 2 * PAIRS + rest_R[None, :]
        rest_hR = tl.load(x_ptr + token * x_token + of_head_hR, mask=inside_hR)
        of_head_hR = head_h[:, None] * y_head + 2 * PAIRS + rest_R[None, :]
        tl.store(y_ptr + token * y_token + of_head_hR, rest_hR, mask=inside_hR)


def turn(x_CHD: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    """Return ``x`` with each pair (i, i + P) rotated by ``sign`` times its token's angle.

    ``cos`` and ``sin`` are ``[C, 1, P]`` in fp32 or better, see
    :class:`sppo.kernels.rotary.RotaryTable`. The rotation is computed in the dtype of ``cos`` and
    returned in the dtype of ``x``.
    """
    x_CHD = row_major(x_CHD)
    y_CHD = torch.empty(x_CHD.shape, dtype=x_CHD.dtype, device=x_CHD.device)
    tokens, heads, head_size = x_CHD.shape
    cos, sin = row_major(cos), row_major(sin)
    pairs = cos.shape[-1]
    rest, block = head_size - 2 * pairs, triton.next_power_of_2(pairs)
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
            PAIRS=pairs,
            REST=rest,
            BLOCK=block,
            REST_BLOCK=triton.next_power_of_2(max(1, rest)),
            HEADS=of_tile,
        )
    return y_CHD
