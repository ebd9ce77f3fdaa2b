"""Decisions of every launch of a Triton kernel: device, accumulation type, interpreter or not.

The kernels also run on CPU tensors under Triton's interpreter, which is how they are tested without
a GPU: set ``TRITON_INTERPRET=1`` before triton is first imported.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
MIN_DOT_SIZE = 16
"""Smallest side of a matrix product's operands."""


@triton.jit
def dot(a, b, UPCAST: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """``a @ b`` summed in ``ACC_DTYPE``, without TF32.

    The interpreter keeps bf16 as integers and would multiply those: with ``UPCAST`` operands are
    converted to fp32 first, which changes no bit of the exact products.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee", out_dtype=ACC_DTYPE)


@triton.jit
def load_rows(base_ptr, row_r, num_rows, row_stride, d_D, SIZE: tl.constexpr, FIT: tl.constexpr):
    """``[r, D]`` of a row-major matrix; zero outside of it. ``FIT`` promises that all rows exist.

    Offsets are 64 bit wide: a key/value store of 4 million tokens has more than 2^31 elements.
    """
    pointers = base_ptr + row_r.to(tl.int64)[:, None] * row_stride + d_D[None, :]
    if d_D.shape[0] == SIZE:
        if FIT:
            x_rD = tl.load(pointers)
        else:
            x_rD = tl.load(pointers, mask=row_r[:, None] < num_rows, other=0.0)
    elif FIT:
        x_rD = tl.load(pointers, mask=d_D[None, :] < SIZE, other=0.0)
    else:
        inside = (row_r[:, None] < num_rows) & (d_D[None, :] < SIZE)
        x_rD = tl.load(pointers, mask=inside, other=0.0)
    return x_rD


@triton.jit
def store_rows(base_ptr, row_r, num_rows, row_stride, d_D, x_rD, SIZE: tl.constexpr):
    """Writes the rows and columns that exist, in the matrix's type."""
    pointers = base_ptr + row_r.to(tl.int64)[:, None] * row_stride + d_D[None, :]
    inside = (row_r[:, None] < num_rows) & (d_D[None, :] < SIZE)
    tl.store(pointers, x_rD.to(base_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rows(base_ptr, row_r, num_rows, row_stride, d_D, x_rD, SIZE: tl.constexpr):
    """Adds to the rows and columns that exist, of the same type.

    By reductions in the L2 cache, which take no registers as reading would. Where a program alone
    adds to its rows, their order is not left to chance.
    """
    pointers = base_ptr + row_r.to(tl.int64)[:, None] * row_stride + d_D[None, :]
    inside = (row_r[:, None] < num_rows) & (d_D[None, :] < SIZE)
    tl.atomic_add(pointers, x_rD, mask=inside, sem="relaxed")


INTERPRETED = not isinstance(dot, triton.runtime.JITFunction)
"""The kernels of this process run under the interpreter, on CPU tensors."""


def accumulation_type(dtype: torch.dtype) -> Any:
    """Triton's type for sums over values of ``dtype``."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def must_upcast(dtype: torch.dtype) -> bool:
    """Return whether :func:`dot` must convert operands of this dtype."""
    return INTERPRETED and dtype == torch.bfloat16


def compute_major() -> int:
    """Major number of the compute capability that kernels on the current device are compiled for.

    8, the oldest that there are tiles for, under the interpreter.
    """
    return 8 if INTERPRETED else triton.runtime.driver.active.get_current_target().arch // 10


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device: make it that of ``x``."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def block_size(size: int) -> int:
    """The power of two that holds ``size`` columns of a matrix product's operand."""
    return max(MIN_DOT_SIZE, 1 << (size - 1).bit_length())


def row_major(x: Tensor) -> Tensor:
    """Return ``x`` with its last dimension contiguous, copied only where it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()
