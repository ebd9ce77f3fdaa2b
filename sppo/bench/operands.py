"""Operands of kernels: tensors of random numbers that are drawn once.

Numbers are random because devices run faster on zeros, and are drawn once because drawing takes
longer than most kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from sppo.kernels.attention.kv_layout import empty_keys
from sppo.units import MIB

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_HEAP_BLOCK_BYTES = 31 * MIB
"""Bytes of nearly the largest block that glibc can allocate from its heap."""
_POOL_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}


class Operands:
    """Source of random tensors on one device.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self.device = device
        # The C library allocates blocks up to the largest one freed so far from its heap, and asks
        # the system for each larger block. Free a large block, as a training run soon does with a
        # tile of logits.
        torch.empty(_HEAP_BLOCK_BYTES, dtype=torch.uint8).fill_(0)
        self._random = torch.randn(_POOL_ELEMENTS[device], device=device)
        self._pools: dict[torch.dtype, Tensor] = {torch.float32: self._random}
        self._used = 0

    def begin(self) -> None:
        """Allow the memory of all operands taken so far to be reused."""
        self._used = 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a random tensor that overlaps no other one taken since :meth:`begin`."""
        elements = prod(shape)
        if self._used + elements > self._random.numel():
            return torch.randn(shape, device=self.device, dtype=dtype)
        if dtype not in self._pools:
            self._pools[dtype] = self._random.to(dtype)
        self._used += elements
        return self._pools[dtype][self._used - elements : self._used].view(shape)

    def take_keys(self, tokens: int, heads: int, head_size: int, *, dtype: torch.dtype) -> Tensor:
        """Return random keys or values ``[T, K, D]`` in the memory layout of training."""
        room = empty_keys(tokens, heads, head_size, dtype=dtype, device=self.device)
        return room.copy_(self.take(tokens, heads, head_size, dtype=dtype))

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros, for sums."""
        return torch.zeros(shape, device=self.device, dtype=dtype)
