"""torch's cuDNN attention as a block kernel, with lse and a backward."""

from __future__ import annotations

import torch
from torch import Tensor

from sppo.kernels.attention.block_attention import BlockCall


class CudnnBlocks:
    """Block kernel over ``aten::_scaled_dot_product_cudnn_attention``.

    Some versions of torch return lse with a last dimension of one, and their backward expects it.
    """

    def __init__(self) -> None:
        self._lse_columns = True

    def forward(self, call: BlockCall) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of one block by torch's cuDNN attention."""
        q, k, v = call.q, _dense(call.k), _dense(call.v)
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, call.mask, True, 0.0, call.causal, False, scale=call.scale
        )
        self._lse_columns = lse.dim() == q.dim()
        return o, lse.reshape(q.shape[:-1])

    def backward(
        self, call: BlockCall, do: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of one block by torch's cuDNN attention."""
        q, k, v = call.q, _dense(call.k), _dense(call.v)
        no_dropout = torch.empty((), dtype=torch.int64, device=q.device)  # never read
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do,
            q,
            k,
            v,
            o,
            lse.contiguous().unsqueeze(-1) if self._lse_columns else lse.contiguous(),
            no_dropout,
            no_dropout,
            call.mask,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            call.causal,
            scale=call.scale,
        )
        return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    """Return ``x``, copied if it has strides of zero, as the K and V of a causal square have."""
    return x.contiguous() if 0 in x.stride() else x
