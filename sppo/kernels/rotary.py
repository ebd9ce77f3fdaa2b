"""Rotary position embedding of queries and keys, forward and backward.

The first 2P of D dimensions of a head are rotated, which are all of them in most models. Pairs are
(i, i + P), as in the Hugging Face layout of Llama, Qwen and Mistral.

Legend: C tokens, H heads (query or key), D head size, P pairs that are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.kernels.fused import fused
from sppo.kernels.row_tiles import row_tiles


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of each token's angles, both ``[C, 1, P]`` in fp32 or better."""

    cos: Tensor
    sin: Tensor


def rotate(x_CHD: Tensor, table: RotaryTable) -> Tensor:
    """Return ``x`` with each pair rotated by its token's angle: computed in fp32, in x's dtype."""
    return _turn(x_CHD, table.cos, table.sin, sign=1.0)


def rotate_backward(dy_CHD: Tensor, table: RotaryTable) -> Tensor:
    """Return the gradient of :func:`rotate`'s input: ``dy`` rotated by the opposite angles."""
    return _turn(dy_CHD, table.cos, table.sin, sign=-1.0)


def _turn(x_CHD: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    if fused(x_CHD):
        from sppo.kernels.triton import rotary

        return rotary.turn(x_CHD, cos, sin, sign=sign)
    turned, size = torch.empty_like(x_CHD, memory_format=torch.contiguous_format), 2 * cos.shape[-1]
    for rows in row_tiles(x_CHD):
        tile = _turn_tile(x_CHD[rows, :, :size], cos[rows], sin[rows], sign=sign)
        turned[rows, :, :size] = tile
    if size < x_CHD.shape[-1]:
        turned[..., size:] = x_CHD[..., size:]
    return turned


def _turn_tile(x_tHR: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    """Return one tile of tokens with each pair rotated, R = 2P, in fp32 or better."""
    first, second = x_tHR.chunk(2, dim=-1)
    turned = torch.empty(x_tHR.shape, dtype=cos.dtype, device=x_tHR.device)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=left)
    left.addcmul_(second.to(cos.dtype), sin, value=-sign)
    torch.mul(second, cos, out=right)
    right.addcmul_(first.to(cos.dtype), sin, value=sign)
    return turned
