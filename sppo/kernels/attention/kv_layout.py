"""Layout of keys, values and their gradients in memory.

``[T, K, D]`` everywhere to look at. On a CPU a head's tokens lie next to each other, because its
kernels go head by head and read a strided one a twentieth slower; kernels of GPUs read any stride
alike, and there a token's heads lie next to each other, as they come. So they do where ranks send
each other what is stored: a prefix is one stretch of memory then.
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty_keys(
    tokens: int,
    heads: int,
    head_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    sent: bool = False,
) -> Tensor:
    """Room ``[T, K, D]`` for keys, values or gradients of either.

    Args:
        tokens: T.
        heads: K.
        head_size: D.
        dtype: of the elements.
        device: where they live.
        sent: whether ranks send each other prefixes of them.
    """
    if sent or torch.device(device).type != "cpu":
        return torch.empty((tokens, heads, head_size), dtype=dtype, device=device)
    return torch.empty((heads, tokens, head_size), dtype=dtype, device=device).transpose(0, 1)


def copy_by_token(x_CKD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return a copy of ``x_CKD`` in ``dtype`` with the heads of a token next to each other.

    That is how projections read it. The copy never shares memory with ``x_CKD``, so it may outlive
    the buffer that ``x_CKD`` is a part of.
    """
    return torch.empty(x_CKD.shape, dtype=dtype, device=x_CKD.device).copy_(x_CKD)
