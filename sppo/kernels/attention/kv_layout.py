"""Memory layout of keys, values and their gradients.

Their shape is always ``[T, K, D]``. On a CPU the tokens of a head are contiguous, because CPU
kernels compute head by head and read a strided head 5 % slower. On a GPU the heads of a token are
contiguous, as the projections produce them: GPU kernels read any stride equally fast. Tensors that
ranks send to each other also have contiguous heads of a token, so that a prefix is contiguous.
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
    """Allocate an uninitialised ``[T, K, D]`` tensor for keys, values or gradients of either.

    Args:
        tokens: T, the number of tokens.
        heads: K, the number of key/value heads.
        head_size: D, the size of a head.
        dtype: Type of the elements.
        device: Device of the tensor.
        sent: Whether ranks send each other prefixes of the tensor.
    """
    if sent or torch.device(device).type != "cpu":
        return torch.empty((tokens, heads, head_size), dtype=dtype, device=device)
    return torch.empty((heads, tokens, head_size), dtype=dtype, device=device).transpose(0, 1)


def copy_by_token(x_CKD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return a copy of ``x_CKD`` in ``dtype`` with contiguous heads of a token, for projections.

    The copy never shares memory with ``x_CKD``, so it may outlive the buffer of ``x_CKD``.
    """
    return torch.empty(x_CKD.shape, dtype=dtype, device=x_CKD.device).copy_(x_CKD)
