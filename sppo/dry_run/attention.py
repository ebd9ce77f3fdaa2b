"""Attention back ends on a fake GPU: torch's shapes, and the memory kernels take.

What a back end's package allocates inside a call no fake tensor shows; it is allocated beside the
call here, as :mod:`sppo.cost.live_sets.attention_scratch` counts it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sppo.cost.live_sets.attention_scratch import backward_scratch_bytes
from sppo.kernels.attention.cudnn_blocks import CudnnBlocks
from sppo.kernels.attention.flash_packages import TorchFlash
from sppo.kernels.attention.kernel import AttentionKernel, OfBlocks
from sppo.kernels.attention.rectangle_attention import OfRectangles


def fake_attention(backend: str) -> AttentionKernel:
    """Return what stands for a back end that :func:`sppo.cost.attention_backend` may name."""
    if backend == "triton":
        from sppo.kernels.attention.triton_blocks import TritonAttention

        return TritonAttention()
    kernel: Any = _WithScratch(CudnnBlocks() if backend == "cudnn" else TorchFlash(), backend)
    return OfBlocks(kernel) if backend == "cudnn" else OfRectangles(kernel)


class _WithScratch:
    """A kernel, and what its backward allocates inside."""

    def __init__(self, kernel: Any, backend: str) -> None:
        self._kernel, self._backend = kernel, backend

    def __getattr__(self, name: str) -> Any:
        """Return what else the kernel has."""
        return getattr(self._kernel, name)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kernel's gradients."""
        tokens_first = q.dim() == 3
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
        gradients: tuple[Tensor, Tensor, Tensor] = self._kernel.backward(
            do, q, k, *others, **options
        )
        del scratch
        return gradients
