"""torch's cuDNN attention as a block kernel, with lse and a backward."""

from __future__ import annotations

import torch
from torch import Tensor


class CudnnBlocks:
    """Block kernel over ``aten::_scaled_dot_product_cudnn_attention``.

    Some versions of torch return lse with a last dimension of one, and their backward expects it.
    """

    def __init__(self) -> None:
        self._lse_columns = True

    def backward_token_multiple(self, dtype: torch.dtype) -> int | None:
        """Return None: backward supports any number of tokens."""
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of one block by torch's cuDNN attention."""
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, _dense(k), _dense(v), mask, True, 0.0, causal, False, scale=scale
        )
        self._lse_columns = lse.dim() == q.dim()
        return o, lse.reshape(q.shape[:-1])

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of one block by torch's cuDNN attention."""
        no_dropout = torch.empty((), dtype=torch.int64, device=q.device)  # never read
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do,
            q,
            _dense(k),
            _dense(v),
            o,
            lse.contiguous().unsqueeze(-1) if self._lse_columns else lse.contiguous(),
            no_dropout,
            no_dropout,
            mask,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            scale=scale,
        )
        return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    """Return ``x``, copied if it has strides of zero, as the K and V of a causal square have."""
    return x.contiguous() if 0 in x.stride() else x
