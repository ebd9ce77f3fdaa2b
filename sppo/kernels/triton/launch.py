"""Parts shared by all Triton kernels: loads and stores of rows, types and devices of launches.

The kernels also run on CPU tensors under Triton's interpreter, so that they can be tested without a
GPU: set ``TRITON_INTERPRET=1`` before triton is first imported.
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
"""Smallest dimension of an operand of ``tl.dot``."""


@triton.jit
def dot(a, b, UPCAST: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Return ``a @ b`` summed in ``ACC_DTYPE``, without TF32.

    The interpreter stores bf16 as integers and would multiply these: with ``UPCAST`` operands are
    converted to fp32 first, in which their products are exact.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee", out_dtype=ACC_DTYPE)


@triton.jit
def load_rows(base_ptr, row_r, num_rows, row_stride, d_D, SIZE: tl.constexpr, FIT: tl.constexpr):
    """Return ``[r, D]`` of a row-major matrix, zero outside; ``FIT`` asserts that all rows exist.

    Offsets have 64 bits: a key/value store of 4 million tokens has more than 2^31 elements.
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
    """Write the existing rows and columns of ``x_rD`` to a row-major matrix, in its type."""
    pointers = base_ptr + row_r.to(tl.int64)[:, None] * row_stride + d_D[None, :]
    inside = (row_r[:, None] < num_rows) & (d_D[None, :] < SIZE)
    tl.store(pointers, x_rD.to(base_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rows(base_ptr, row_r, num_rows, row_stride, d_D, x_rD, SIZE: tl.constexpr):
    """Add the existing rows and columns of ``x_rD`` to a row-major matrix of the same type.

    Atomic additions are reductions in the L2 cache, which need no registers for the old values. If
    only one program adds to a row, the order of additions is deterministic.
    """
    pointers = base_ptr + row_r.to(tl.int64)[:, None] * row_stride + d_D[None, :]
    inside = (row_r[:, None] < num_rows) & (d_D[None, :] < SIZE)
    tl.atomic_add(pointers, x_rD, mask=inside, sem="relaxed")


INTERPRETED = not isinstance(dot, triton.runtime.JITFunction)
"""True if this process runs kernels under Triton's interpreter, on CPU tensors."""


def accumulation_type(dtype: torch.dtype) -> Any:
    """Return Triton's type for sums over values of ``dtype``: fp32, or float64 for float64."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def must_upcast(dtype: torch.dtype) -> bool:
    """Return whether :func:`dot` must convert operands of ``dtype`` to fp32."""
    return INTERPRETED and dtype == torch.bfloat16


def compute_major() -> int:
    """Return the major compute capability that kernels on the current device are compiled for.

    Under the interpreter the result is 8, the oldest one for which there are tiles.
    """
    return 8 if INTERPRETED else triton.runtime.driver.active.get_current_target().arch // 10


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of ``x`` is current, so that launches go to it."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def block_size(size: int) -> int:
    """Return the smallest power of two of at least ``size`` and :data:`MIN_DOT_SIZE`."""
    return max(MIN_DOT_SIZE, 1 << (size - 1).bit_length())


def row_major(x: Tensor) -> Tensor:
    """Return ``x`` if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
