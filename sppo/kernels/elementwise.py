"""Norms and activations, forward and backward: plain torch, or one Triton kernel each on a GPU.

Statistics and parameter gradients are computed in fp32 (float64 for float64 inputs) for every dtype
of the activations. These functions save nothing for backward: the layer saves some of their inputs
by name, and all else is recomputed. On a CPU the work is done in tiles of rows, see
:mod:`sppo.kernels.row_tiles`. :mod:`sppo.kernels.triton` has the same functions; its modules are
imported at their first use.

A residual addition next to a norm is part of the norm's kernel. In forward the sum is rounded
before the norm, so that recomputing the norm from the rounded sum gives the same bits. In backward
the residual's gradient is added before the gradient of the norm is rounded.

Legend: C tokens, E hidden, F MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sppo.config.model import Activation
from sppo.kernels.fused import fused, fused_in_place
from sppo.kernels.norm_parameters import NormParameters
from sppo.kernels.row_tiles import row_tiles

CLAMP = 7.0
"""Largest gate, and largest magnitude of up, of the activation swiglu_clamped (gpt-oss)."""
CLAMPED_SLOPE = 1.702
"""Factor inside the sigmoid of swiglu_clamped, with which ``x sigmoid(1.702 x)`` is near gelu."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over values of ``dtype``: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def norm(x_CE: Tensor, parameters: NormParameters) -> Tensor:
    """Return the norm of ``x`` over the last dimension, in x's dtype."""
    if fused(x_CE):
        from sppo.kernels.triton import norms

        return norms.norm(x_CE, parameters)
    weight_E, bias_E, eps, _ = parameters
    if bias_E is not None:
        return functional.layer_norm(x_CE, (x_CE.shape[-1],), weight_E, bias_E, eps)
    normed = torch.empty_like(x_CE)
    for rows in row_tiles(x_CE):
        _norm_tile(x_CE[rows], parameters, out_tE=normed[rows])
    return normed


def add_norm_(total_CE: Tensor, x_CE: Tensor, parameters: NormParameters) -> Tensor:
    """Add ``x_CE`` to ``total_CE`` in place and return the :func:`norm` of the rounded sum."""
    if fused_in_place(total_CE):
        from sppo.kernels.triton import norms

        return norms.add_norm_(total_CE, x_CE, parameters)
    normed = torch.empty_like(total_CE)
    for rows in row_tiles(total_CE):
        total_tE = total_CE[rows].add_(x_CE[rows])
        _norm_tile(total_tE, parameters, out_tE=normed[rows])
    return normed


def _norm_tile(x_tE: Tensor, parameters: NormParameters, *, out_tE: Tensor) -> None:
    """Write the norm of one tile of tokens to ``out_tE``."""
    weight_E, bias_E, eps, offset = parameters
    if offset:
        out_tE.copy_((x_tE * _inverse_rms(x_tE, eps)).mul_(_one_plus(weight_E)))
    elif bias_E is None:
        torch.mul(x_tE, _inverse_rms(x_tE, eps), out=out_tE).mul_(weight_E)
    else:
        out_tE.copy_(functional.layer_norm(x_tE, (x_tE.shape[-1],), weight_E, bias_E, eps))


def norm_backward(
    dy_CE: Tensor,
    x_CE: Tensor,
    parameters: NormParameters,
    *,
    dresidual_CE: Tensor | None = None,
    with_parameters: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (dx in x's dtype, dweight in fp32, dbias in fp32) of :func:`norm`.

    ``dresidual_CE``, the gradient of x through the residual connection, is added to dx. Without
    ``with_parameters``, for frozen parameters, dweight and dbias are None; dbias also for RMSNorm.
    """
    if fused(x_CE):
        from sppo.kernels.triton import norms

        return norms.norm_backward(
            dy_CE, x_CE, parameters, dresidual_CE=dresidual_CE, with_parameters=with_parameters
        )
    weight_E, bias_E, eps, offset = parameters
    weight_E = _one_plus(weight_E) if offset else weight_E
    dx = torch.empty_like(x_CE)
    sums = [
        torch.zeros_like(x, dtype=accumulation_dtype(x_CE.dtype))
        for x in (weight_E, bias_E)
        if x is not None and with_parameters
    ]
    for rows in row_tiles(x_CE):
        tiles = dy_CE[rows], x_CE[rows], weight_E
        if bias_E is None:
            dx_tile, *of_tile = _rms_norm_backward(*tiles, eps, with_parameters)
        else:
            dx_tile, *of_tile = _layer_norm_backward(*tiles, bias_E, eps, with_parameters)
        dx[rows] = dx_tile if dresidual_CE is None else dx_tile.add_(dresidual_CE[rows])
        for total, part in zip(sums, of_tile, strict=False):  # no sums of frozen parameters
            assert part is not None, "parameters that train have gradients"
            total += part
    dweight, dbias = (*sums, None, None)[:2]
    return dx, dweight, dbias


def _rms_norm_backward(
    dy_tE: Tensor, x_tE: Tensor, weight_E: Tensor, eps: float, with_parameters: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (dx, dweight or None) of the RMSNorm of one tile, in fp32 or better.

    With n = x / rms(x) and g = dy * weight: dx = (g - n mean(g n)) / rms(x), dweight = sum dy n.
    """
    inverse = _inverse_rms(x_tE, eps)
    normed = x_tE * inverse
    product = dy_tE * normed
    dweight = product.flatten(0, -2).sum(0) if with_parameters else None
    mean = product.mul_(weight_E).mean(-1, keepdim=True)
    dx = dy_tE.to(normed.dtype) * weight_E
    return dx.addcmul_(normed, mean, value=-1.0).mul_(inverse), dweight


def _one_plus(weight_E: Tensor) -> Tensor:
    """Return the factor of a norm whose weight is an offset from one, in fp32 or better."""
    return weight_E.to(accumulation_dtype(weight_E.dtype)) + 1


def _inverse_rms(x_E: Tensor, eps: float) -> Tensor:
    """Return ``1 / rms(x)`` per row, ``[..., 1]`` in fp32 or better."""
    length: Tensor = torch.linalg.vector_norm(
        x_E, dim=-1, keepdim=True, dtype=accumulation_dtype(x_E.dtype)
    )
    return length.square_().div_(x_E.shape[-1]).add_(eps).rsqrt_()


def _layer_norm_backward(
    dy_tE: Tensor,
    x_tE: Tensor,
    weight_E: Tensor,
    bias_E: Tensor,
    eps: float,
    with_parameters: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (dx, dweight or None, dbias or None) of a tile's LayerNorm, in fp32 or better."""
    dtype, shape = accumulation_dtype(x_tE.dtype), [x_tE.shape[-1]]
    dy, x, weight, bias = (t.to(dtype) for t in (dy_tE, x_tE, weight_E, bias_E))
    _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, shape, mean, rstd, weight, bias, [True, with_parameters, with_parameters]
    )
    return dx, dweight, dbias


@dataclass(frozen=True, slots=True)
class ActivationGradient:
    """Results of :func:`activation_backward_`."""

    hidden_CF: Tensor
    """Output of the activation, recomputed for the weight gradient of the down projection."""
    dgate_CF: Tensor | None
    """Gradient of the gate projection's output; None without a gate."""
    dup_CF: Tensor
    """Gradient of the up projection's output."""


def activation(gate_CF: Tensor | None, up_CF: Tensor, *, kind: Activation) -> Tensor:
    """Return the activation of the MLP's projections, ``[C, F]``; without a gate, of up alone.

    With silu(x) = x sigmoid(x), the kinds are

        swiglu          silu(gate) * up
        geglu_tanh      gelu(gate) * up
        swiglu_clamped  g sigmoid(1.702 g) * (u + 1), with g = min(gate, 7), u = up within -7 and 7
        gelu            gelu(up); gelu_tanh approximates it by tanh, as geglu_tanh does
        relu2           max(up, 0)^2
    """
    if fused(up_CF):
        from sppo.kernels.triton import activations

        return activations.activation(gate_CF, up_CF, kind=kind)
    if gate_CF is None:
        return _plain(up_CF, kind)
    if kind != "swiglu_clamped":
        return _gate(gate_CF, kind).mul_(up_CF)
    hidden_CF = torch.empty_like(up_CF)
    for rows in row_tiles(up_CF):
        torch.mul(_gate(gate_CF[rows], kind), _factor(up_CF[rows], kind), out=hidden_CF[rows])
    return hidden_CF


def activation_backward_(
    dhidden_CF: Tensor, gate_CF: Tensor | None, up_CF: Tensor, *, kind: Activation
) -> ActivationGradient:
    """Return the gradients and the recomputed output of :func:`activation`, in place.

    The three results overwrite ``dhidden_CF``, ``gate_CF`` and ``up_CF``: these have the MLP's
    width and are the largest tensors of a layer, and backward does not need them afterwards.
    """
    if fused_in_place(up_CF, gate_CF, dhidden_CF):
        from sppo.kernels.triton import activations

        activations.activation_backward_(dhidden_CF, gate_CF, up_CF, kind=kind)
        return ActivationGradient(up_CF, gate_CF, dhidden_CF)
    for rows in row_tiles(up_CF):
        if gate_CF is None:
            _plain_backward_(dhidden_CF[rows], up_CF[rows], kind=kind)
        else:
            _gated_backward_(dhidden_CF[rows], gate_CF[rows], up_CF[rows], kind=kind)
    return ActivationGradient(up_CF, gate_CF, dhidden_CF)


def _gated_backward_(
    dhidden_tF: Tensor, gate_tF: Tensor, up_tF: Tensor, *, kind: Activation
) -> None:
    """Turn dhidden into dup, gate into dgate and up into the activation's output, for one tile."""
    value, factor = _gate(gate_tF, kind), _factor(up_tF, kind)
    gate_tF.copy_(_gate_backward(dhidden_tF * factor, gate_tF, kind))
    dhidden_tF.mul_(value)
    if kind == "swiglu_clamped":
        dhidden_tF.mul_(up_tF.abs() <= CLAMP)
    up_tF.copy_(value.mul_(factor))


def _gate(gate_tF: Tensor, kind: Activation) -> Tensor:
    """Return the function of the gate by which a gated activation multiplies, in new memory."""
    if kind == "swiglu":
        return functional.silu(gate_tF)
    if kind == "geglu_tanh":
        return functional.gelu(gate_tF, approximate="tanh")
    below = gate_tF.clamp(max=CLAMP)
    return below.mul_((CLAMPED_SLOPE * below).sigmoid_())


def _factor(up_tF: Tensor, kind: Activation) -> Tensor:
    """Return what a gated activation multiplies the function of the gate by."""
    return up_tF.clamp(-CLAMP, CLAMP).add_(1) if kind == "swiglu_clamped" else up_tF


def _gate_backward(dvalue_tF: Tensor, gate_tF: Tensor, kind: Activation) -> Tensor:
    """Return the gradient of :func:`_gate`'s input."""
    gradient: Tensor
    if kind == "swiglu":
        gradient = torch.ops.aten.silu_backward(dvalue_tF, gate_tF)
    elif kind == "geglu_tanh":
        gradient = torch.ops.aten.gelu_backward(dvalue_tF, gate_tF, approximate="tanh")
    else:  # x sigmoid(a x) = silu(a x) / a, whose slope at x is that of silu at a x
        inner = CLAMPED_SLOPE * gate_tF.clamp(max=CLAMP)
        gradient = torch.ops.aten.silu_backward(dvalue_tF, inner).mul_(gate_tF <= CLAMP)
    return gradient


def _plain(up_CF: Tensor, kind: Activation) -> Tensor:
    """Return the activation without a gate, in new memory."""
    if kind == "relu2":
        return functional.relu(up_CF).square_()
    return functional.gelu(up_CF, approximate=_APPROXIMATE[kind])


def _plain_backward_(dhidden_tF: Tensor, up_tF: Tensor, *, kind: Activation) -> None:
    """Turn dhidden into dup and up into the activation's output, for one tile."""
    if kind == "relu2":
        above = functional.relu(up_tF)
        dhidden_tF.mul_(above).mul_(2)
        up_tF.copy_(above.square_())
        return
    approximate = _APPROXIMATE[kind]
    dhidden_tF.copy_(torch.ops.aten.gelu_backward(dhidden_tF, up_tF, approximate=approximate))
    up_tF.copy_(functional.gelu(up_tF, approximate=approximate))


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
