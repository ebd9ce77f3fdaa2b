"""Cross entropy of a tile of logits: losses alone, or losses and a gradient that replaces logits.

A program owns a row. A first pass over the vocabulary computes the largest logit and the sum of
exponentials, which is rescaled at every larger logit (Milakov and Gimelshein, 2018, algorithm 3); a
second pass writes the gradient. Both passes compute in fp32 (float64 for float64) and round once,
at the end.

Legend: t tokens of a tile, V vocabulary, i tokens of the vocabulary in a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sppo.kernels.triton.launch import accumulation_type, on_device_of, row_major

_LEAST_BLOCK = 1024
"""Smallest block of logits, of which every warp has a part, so that reductions wait for all
loads."""
_MOST_BLOCK = 4096
_BLOCK_PER_WARP = 512
_LOAD_BYTES = 16
"""Most bytes that a thread loads at once."""
_ALIGNED = 16
"""Divisor of row strides for which Triton loads adjacent elements at once."""


@triton.jit
def _row_sums(
    row_ptr,
    size,
    LOGITS_SCALE: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Return (largest logit z, sum of exp(z - largest), sum of z if ``SMOOTHED``) of a row.

    One partial sum is kept for every ``VECTOR`` adjacent logits, which a thread reads at once.
    """
    token_i = tl.arange(0, BLOCK)
    top = tl.full([], float("-inf"), ACC_DTYPE)
    exponentials_v = tl.zeros([BLOCK // VECTOR], ACC_DTYPE)
    logits_v = tl.zeros([BLOCK // VECTOR], ACC_DTYPE)
    for start in range(0, size, BLOCK):
        inside_i = token_i < size - start
        z_i = tl.load(row_ptr + start + token_i, mask=inside_i, other=float("-inf")).to(ACC_DTYPE)
        if LOGITS_SCALE != 1:
            z_i *= LOGITS_SCALE
        higher = tl.maximum(top, tl.max(z_i, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # all logits so far are -inf
        exponentials_v *= tl.exp(top - shift)
        exponentials_v += _vector_sums(tl.exp(z_i - shift), BLOCK, VECTOR)
        top = higher
        if SMOOTHED:
            logits_v += _vector_sums(tl.where(inside_i, z_i, 0.0), BLOCK, VECTOR)
    return top, tl.sum(exponentials_v, 0), tl.sum(logits_v, 0)


@triton.jit
def _vector_sums(x_i, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Return the sums ``[BLOCK // VECTOR]`` of each ``VECTOR`` adjacent elements."""
    return tl.sum(tl.reshape(x_i, [BLOCK // VECTOR, VECTOR]), 1)


@triton.jit
def _write_gradient(
    row_ptr,
    label,
    top,
    of_exponential,
    of_label,
    of_token,
    size,
    LOGITS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``of_exponential exp(z - top) - of_token``, less ``of_label`` at the label."""
    token_i = tl.arange(0, BLOCK)
    for start in range(0, size, BLOCK):
        inside_i = token_i < size - start
        z_i = tl.load(row_ptr + start + token_i, mask=inside_i, other=0.0).to(top.dtype)
        if LOGITS_SCALE != 1:
            z_i *= LOGITS_SCALE
        gradient_i = tl.exp(z_i - top) * of_exponential - of_token
        gradient_i -= tl.where(start + token_i == label, of_label, 0.0)
        gradient_i = gradient_i.to(row_ptr.dtype.element_ty)
        tl.store(row_ptr + start + token_i, gradient_i, mask=inside_i)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    labels_ptr,
    scale_ptr,
    losses_ptr,
    correct_ptr,
    size,
    row_stride,
    LABEL_SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    LOGITS_SCALE: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    label = tl.load(labels_ptr + row)
    of_label = tl.load(row_ptr + label).to(ACC_DTYPE)
    if LOGITS_SCALE != 1:
        of_label *= LOGITS_SCALE
    top, exponentials, logits = _row_sums(
        row_ptr, size, LOGITS_SCALE, LABEL_SMOOTHING > 0, BLOCK, VECTOR, ACC_DTYPE
    )
    log_sum = tl.log(exponentials)
    loss = log_sum + (1.0 - LABEL_SMOOTHING) * (top - of_label)
    if LABEL_SMOOTHING > 0:
        loss += LABEL_SMOOTHING * (top - logits / size)
    if Z_LOSS > 0:
        loss += Z_LOSS * (log_sum + top) * (log_sum + top)
    tl.store(losses_ptr + row, loss)
    is_number = exponentials == exponentials  # maxima ignore NaN
    tl.store(correct_ptr + row, ((of_label == top) & is_number).to(tl.int8))
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the row before any writes to it
        scale = tl.load(scale_ptr)
        of_lse = scale
        if Z_LOSS > 0:
            of_lse += scale * (2.0 * Z_LOSS) * (log_sum + top)
        _write_gradient(
            row_ptr,
            label,
            top,
            of_lse / exponentials,
            scale * (1.0 - LABEL_SMOOTHING),
            scale * LABEL_SMOOTHING / size,
            size,
            LOGITS_SCALE,
            BLOCK,
        )


def cross_entropy(
    logits_tV: Tensor,
    labels_t: Tensor,
    *,
    label_smoothing: float,
    z_loss: float,
    logits_scale: float = 1.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses and which predictions are correct, ``[t]`` each, of a tile of logits.

    With a ``scale``, the logits, whose rows must be contiguous, are overwritten with the gradient
    of ``scale * losses.sum()``.
    """
    if scale is None:
        logits_tV = row_major(logits_tV)
    assert logits_tV.stride(-1) == 1, "what is written in place cannot be copied first"
    tokens, vocabulary = logits_tV.shape
    acc_dtype, device = torch.promote_types(logits_tV.dtype, torch.float32), logits_tV.device
    losses_t = torch.empty(tokens, dtype=acc_dtype, device=device)
    correct_t = torch.empty(tokens, dtype=torch.bool, device=device)
    block = min(_MOST_BLOCK, max(_LEAST_BLOCK, triton.next_power_of_2(vocabulary)))
    # A tensor, because Triton rounds float arguments to fp32.
    scale_1 = None
    if scale is not None:
        scale_1 = torch.full((1,), scale * logits_scale, dtype=acc_dtype, device=device)
    with on_device_of(logits_tV):
        _cross_entropy_kernel[(tokens,)](
            logits_tV,
            labels_t.contiguous(),
            scale_1,
            losses_t,
            correct_t.view(torch.int8),
            vocabulary,
            logits_tV.stride(0),
            LABEL_SMOOTHING=label_smoothing,
            Z_LOSS=z_loss,
            LOGITS_SCALE=logits_scale,
            GRADIENT=scale is not None,
            BLOCK=block,
            VECTOR=_vector(logits_tV),
            ACC_DTYPE=accumulation_type(logits_tV.dtype),
            num_warps=block // _BLOCK_PER_WARP,
        )
    return losses_t, correct_t


def _vector(logits_tV: Tensor) -> int:
    """Return the number of adjacent elements of a row that a thread reads at once."""
    aligned = logits_tV.stride(0) % _ALIGNED == 0
    return _LOAD_BYTES // logits_tV.element_size() if aligned else 1
