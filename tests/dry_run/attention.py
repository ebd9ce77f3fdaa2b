"""Attention back ends on a fake GPU, with the scratch memory of their kernels.

Fake tensors do not show memory that a back end's package allocates inside a call. Here this memory
is allocated around the call, in the size that a plan counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sppo.cost.live_sets.gpu_attention_live_sets import backward_scratch_bytes
from sppo.kernels.attention.block_attention import BlockAttention
from sppo.kernels.attention.choice import KERNELS, AttentionKernel
from sppo.kernels.attention.cudnn_blocks import CudnnBlocks
from sppo.kernels.attention.flash_packages import TorchFlash
from sppo.kernels.attention.rectangle_attention import RectangleAttention


def fake_attention(backend: str) -> AttentionKernel:
    """Return the replacement of a back end that :mod:`sppo.cost.attention_backend` may choose."""
    if backend == "torch_blocks":
        return KERNELS["torch_blocks"]
    kernel: Any = _WithScratch(CudnnBlocks() if backend == "cudnn" else TorchFlash(), backend)
    return BlockAttention(kernel) if backend == "cudnn" else RectangleAttention(kernel)


class _WithScratch:
    """Attention kernel that also allocates the scratch of its backward."""

    def __init__(self, kernel: Any, backend: str) -> None:
        self._kernel, self._backend = kernel, backend

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the kernel."""
        return getattr(self._kernel, name)

    def backward(self, call: Any, do: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kernel's gradients of q, k and v, with scratch allocated during the call."""
        tokens_first = do.dim() == 3
        q, k = (call.q_cND, call.k_tKD) if tokens_first else (call.q, call.k)
        (rows, heads), (keys, kv_heads) = (
            (x.shape[:2] if tokens_first else (x.shape[2], x.shape[0] * x.shape[1])) for x in (q, k)
        )
        scratch = torch.empty(
            backward_scratch_bytes(
                self._backend,
                rows=rows,
                keys=keys,
                heads=heads,
                kv_heads=kv_heads,
                head_size=q.shape[-1],
                element_bytes=q.element_size(),
            ),
            dtype=torch.uint8,
            device=q.device,
        )
        gradients: tuple[Tensor, Tensor, Tensor] = self._kernel.backward(call, do, *others)
        del scratch
        return gradients
