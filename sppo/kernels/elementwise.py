"""Norms and activations, each a forward and a backward, in plain torch.

Statistics and parameter gradients are computed in fp32 (float64 for float64 inputs) whatever the
dtype of the activations. Nothing here is saved for backward: inputs are, by name, and the rest is
rebuilt.

Legend: C tokens, E hidden, F MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["swiglu", "gelu", "gelu_tanh"]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and statistics over values of ``dtype``: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x_E: Tensor, weight_E: Tensor, *, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, in x's dtype."""
    normed = torch.empty_like(x_E)
    torch.mul(x_E, _inverse_rms(x_E, eps), out=normed)
    return normed.mul_(weight_E)


def rms_norm_backward(
    dy_E: Tensor, x_E: Tensor, weight_E: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(dx in x's dtype, dweight ``[E]`` in fp32) of :func:`rms_norm`.

    With n = x / rms(x) and g = dy * weight: dx = (g - n mean(g n)) / rms(x), dweight = sum dy n.
    """
    inverse = _inverse_rms(x_E, eps)
    normed = x_E * inverse
    product = dy_E * normed
    dweight = product.flatten(0, -2).sum(0)
    mean = product.mul_(weight_E).mean(-1, keepdim=True)
    dx = dy_E.to(normed.dtype) * weight_E
    dx.addcmul_(normed, mean, value=-1.0).mul_(inverse)
    return dx.to(x_E.dtype), dweight


def _inverse_rms(x_E: Tensor, eps: float) -> Tensor:
    """``1 / rms(x)`` per row, ``[..., 1]`` in fp32 or better."""
    norm: Tensor = torch.linalg.vector_norm(x_E, dim=-1, keepdim=True, dtype=wide_dtype(x_E.dtype))
    return norm.square_().div_(x_E.shape[-1]).add_(eps).rsqrt_()


def layer_norm(x_CE: Tensor, weight_E: Tensor, bias_E: Tensor, *, eps: float) -> Tensor:
    """``(x - mean) / std * weight + bias`` over the last dimension, in x's dtype."""
    return functional.layer_norm(x_CE, (x_CE.shape[-1],), weight_E, bias_E, eps)


def layer_norm_backward(
    dy_CE: Tensor, x_CE: Tensor, weight_E: Tensor, bias_E: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx in x's dtype, dweight, dbias in fp32) of :func:`layer_norm`."""
    wide = wide_dtype(x_CE.dtype)
    dy, x, weight, bias = (t.to(wide) for t in (dy_CE, x_CE, weight_E, bias_E))
    shape = [x.shape[-1]]
    _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, shape, mean, rstd, weight, bias, [True, True, True]
    )
    return dx.to(x_CE.dtype), dweight, dbias


@dataclass(frozen=True, slots=True)
class ActivationGradient:
    """What the backward of an MLP activation yields."""

    hidden_CF: Tensor
    """The activation's output, rebuilt for the weight gradient of the down projection."""
    dgate_CF: Tensor | None
    """Gradient of the gate projection's output; None without a gate."""
    dup_CF: Tensor
    """Gradient of the up projection's output."""


def activation(gate_CF: Tensor | None, up_CF: Tensor, *, kind: Activation) -> Tensor:
    """``silu(gate) * up``, or ``gelu(up)`` where there is no gate."""
    if kind == "swiglu":
        assert gate_CF is not None, "swiglu has a gate"
        return functional.silu(gate_CF).mul_(up_CF)
    return functional.gelu(up_CF, approximate=_APPROXIMATE[kind])


def activation_backward(
    dhidden_CF: Tensor, gate_CF: Tensor | None, up_CF: Tensor, *, kind: Activation
) -> ActivationGradient:
    """Gradient of :func:`activation`; rebuilds its output on the way."""
    if kind == "swiglu":
        assert gate_CF is not None, "swiglu has a gate"
        silu = functional.silu(gate_CF)
        dgate = torch.ops.aten.silu_backward(dhidden_CF * up_CF, gate_CF)
        dup = dhidden_CF * silu
        return ActivationGradient(silu.mul_(up_CF), dgate, dup)
    approximate = _APPROXIMATE[kind]
    dup = torch.ops.aten.gelu_backward(dhidden_CF, up_CF, approximate=approximate)
    return ActivationGradient(functional.gelu(up_CF, approximate=approximate), None, dup)


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
