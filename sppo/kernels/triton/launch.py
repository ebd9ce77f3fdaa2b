"""Parts shared by the launches of all Triton kernels: types, devices and layouts of operands.

The kernels also run on CPU tensors under Triton's interpreter, so that they can be tested without a
GPU: set ``TRITON_INTERPRET=1`` before triton is first imported.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor


def accumulation_type(dtype: torch.dtype) -> Any:
    """Return Triton's type for sums over values of ``dtype``: fp32, or float64 for float64."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of ``x`` is current, so that launches go to it."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def row_major(x: Tensor) -> Tensor:
    """Return ``x`` if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
