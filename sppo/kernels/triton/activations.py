"""MLP activations in one pass: forward, and a backward that overwrites its operands.

Legend: C tokens, F MLP width, i elements of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sppo.config.model import Activation
from sppo.kernels.triton.launch import accumulation_type, on_device_of

_BLOCK = 1024


@triton.jit
def _sigmoid(x_i):
    """Return the sigmoid without overflow of the exponential for either sign."""
    small_i = tl.exp(-tl.abs(x_i))
    return tl.where(x_i >= 0, 1.0, small_i) / (1.0 + small_i)


@triton.jit
def _gelu(x_i, TANH: tl.constexpr):
    """Return (gelu, derivative of gelu)."""
    if TANH:  # with u = sqrt(2/pi) (x + 0.044715 x^3): (1 + tanh(u)) / 2 = sigmoid(2 u)
        share_i = _sigmoid(1.5957691216057308 * (x_i + 0.044715 * x_i * x_i * x_i))
        inner_i = 1.5957691216057308 * (1.0 + 0.134145 * x_i * x_i)
        slope_i = share_i + x_i * share_i * (1.0 - share_i) * inner_i
    else:  # the normal distribution and its density
        share_i = 0.5 * (1.0 + tl.erf(x_i * 0.7071067811865476))
        slope_i = share_i + x_i * tl.exp(-0.5 * x_i * x_i) * 0.3989422804014327
    return x_i * share_i, slope_i


@triton.jit
def _gate(x_i, KIND: tl.constexpr):
    """Return (function of the gate by which the activation multiplies, its derivative)."""
    if KIND == "geglu_tanh":
        value_i, slope_i = _gelu(x_i, True)
    elif KIND == "swiglu_clamped":
        below_i = tl.where(x_i > 7.0, 7.0, x_i)
        share_i = _sigmoid(1.702 * below_i)
        value_i = below_i * share_i
        slope_i = tl.where(x_i > 7.0, 0.0, share_i + 1.702 * value_i * (1.0 - share_i))
    else:
        share_i = _sigmoid(x_i)
        value_i = x_i * share_i
        slope_i = share_i + value_i * (1.0 - share_i)
    return value_i, slope_i


@triton.jit
def _factor(up_i, KIND: tl.constexpr):
    """Return what a gated activation multiplies the function of the gate by."""
    if KIND == "swiglu_clamped":
        up_i = tl.where(up_i > 7.0, 7.0, tl.where(up_i < -7.0, -7.0, up_i)) + 1.0
    return up_i


@triton.jit
def _plain(x_i, KIND: tl.constexpr):
    """Return (activation without a gate, its derivative)."""
    if KIND == "relu2":
        above_i = tl.where(x_i < 0.0, 0.0, x_i)
        value_i, slope_i = above_i * above_i, 2.0 * above_i
    else:
        value_i, slope_i = _gelu(x_i, KIND == "gelu_tanh")
    return value_i, slope_i


@triton.jit
def _activation_kernel(
    gate_ptr,
    up_ptr,
    hidden_ptr,
    num_elements,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    index_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside_i = index_i < num_elements
    up_i = tl.load(up_ptr + index_i, mask=inside_i, other=0.0).to(ACC_DTYPE)
    if GATED:
        gate_i = tl.load(gate_ptr + index_i, mask=inside_i, other=0.0).to(ACC_DTYPE)
        value_i, _slope_i = _gate(gate_i, KIND)
        hidden_i = value_i * _factor(up_i, KIND)
    else:
        hidden_i, _slope_i = _plain(up_i, KIND)
    tl.store(hidden_ptr + index_i, hidden_i.to(hidden_ptr.dtype.element_ty), mask=inside_i)


@triton.jit
def _activation_backward_kernel(
    gate_ptr,
    up_ptr,
    dhidden_ptr,
    num_elements,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Overwrite dhidden with dup, gate with dgate, and up with the activation's output."""
    index_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside_i = index_i < num_elements
    dhidden_i = tl.load(dhidden_ptr + index_i, mask=inside_i, other=0.0).to(ACC_DTYPE)
    up_i = tl.load(up_ptr + index_i, mask=inside_i, other=0.0).to(ACC_DTYPE)
    if GATED:
        gate_i = tl.load(gate_ptr + index_i, mask=inside_i, other=0.0).to(ACC_DTYPE)
        value_i, slope_i = _gate(gate_i, KIND)
        factor_i = _factor(up_i, KIND)
        dgate_i = dhidden_i * factor_i * slope_i
        tl.store(gate_ptr + index_i, dgate_i.to(gate_ptr.dtype.element_ty), mask=inside_i)
        hidden_i = value_i * factor_i
        dup_i = dhidden_i * value_i
        if KIND == "swiglu_clamped":
            dup_i = tl.where(tl.abs(up_i) > 7.0, 0.0, dup_i)
    else:
        hidden_i, slope_i = _plain(up_i, KIND)
        dup_i = dhidden_i * slope_i
    tl.store(up_ptr + index_i, hidden_i.to(up_ptr.dtype.element_ty), mask=inside_i)
    tl.store(dhidden_ptr + index_i, dup_i.to(dhidden_ptr.dtype.element_ty), mask=inside_i)


def activation(gate_CF: Tensor | None, up_CF: Tensor, *, kind: Activation) -> Tensor:
    """Compute :func:`sppo.kernels.elementwise.activation` of ``[C, F]`` in one pass."""
    up = up_CF.contiguous()
    gate = None if gate_CF is None else gate_CF.contiguous()
    hidden = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    _launch(_activation_kernel, gate, up, hidden, kind=kind)
    return hidden


def activation_backward_(
    dhidden_CF: Tensor, gate_CF: Tensor | None, up_CF: Tensor, *, kind: Activation
) -> None:
    """Compute the backward of :func:`activation` in place; all operands must be contiguous.

    ``dhidden_CF`` becomes dup, ``gate_CF`` dgate, and ``up_CF`` the activation's output.
    """
    for x in (dhidden_CF, gate_CF, up_CF):
        assert x is None or x.is_contiguous(), "what is written in place cannot be copied first"
    _launch(_activation_backward_kernel, gate_CF, up_CF, dhidden_CF, kind=kind)


def _launch(
    kernel: Any, gate: Tensor | None, up: Tensor, third: Tensor, *, kind: Activation
) -> None:
    with on_device_of(up):
        kernel[(triton.cdiv(up.numel(), _BLOCK),)](
            gate,
            up,
            third,
            up.numel(),
            GATED=gate is not None,
            KIND=kind,
            BLOCK=_BLOCK,
            ACC_DTYPE=accumulation_type(up.dtype),
        )
