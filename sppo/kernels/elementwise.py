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
from sppo.kernels.row_tiles import row_tiles


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over values of ``dtype``: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def norm(x_CE: Tensor, weight_E: Tensor, bias_E: Tensor | None = None, *, eps: float) -> Tensor:
    """Return the norm of ``x`` over the last dimension, in x's dtype: LayerNorm if there is a bias.

    RMSNorm is ``x / rms(x) * weight``, LayerNorm ``(x - mean) / std * weight + bias``.
    """
    if fused(x_CE):
        from sppo.kernels.triton import norms

        return norms.norm(x_CE, weight_E, bias_E, eps=eps)
    if bias_E is not None:
        return functional.layer_norm(x_CE, (x_CE.shape[-1],), weight_E, bias_E, eps)
    normed = torch.empty_like(x_CE)
    for rows in row_tiles(x_CE):
        _norm_tile(x_CE[rows], weight_E, None, eps=eps, out_tE=normed[rows])
    return normed


def add_norm_(
    total_CE: Tensor, x_CE: Tensor, weight_E: Tensor, bias_E: Tensor | None = None, *, eps: float
) -> Tensor:
    """Add ``x_CE`` to ``total_CE`` in place and return the :func:`norm` of the rounded sum."""
    if fused_in_place(total_CE):
        from sppo.kernels.triton import norms

        return norms.add_norm_(total_CE, x_CE, weight_E, bias_E, eps=eps)
    normed = torch.empty_like(total_CE)
    for rows in row_tiles(total_CE):
        total_tE = total_CE[rows].add_(x_CE[rows])
        _norm_tile(total_tE, weight_E, bias_E, eps=eps, out_tE=normed[rows])
    return normed


def _norm_tile(
    x_tE: Tensor, weight_E: Tensor, bias_E: Tensor | None, *, eps: float, out_tE: Tensor
) -> None:
    """Write the norm of one tile of tokens to ``out_tE``."""
    if bias_E is None:
        torch.mul(x_tE, _inverse_rms(x_tE, eps), out=out_tE).mul_(weight_E)
    else:
        out_tE.copy_(functional.layer_norm(x_tE, (x_tE.shape[-1],), weight_E, bias_E, eps))


def norm_backward(
    dy_CE: Tensor,
    x_CE: Tensor,
    weight_E: Tensor,
    bias_E: Tensor | None = None,
    *,
    eps: float,
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
            dy_CE,
            x_CE,
            weight_E,
            bias_E,
            eps=eps,
            dresidual_CE=dresidual_CE,
            with_parameters=with_parameters,
        )
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
    """Return ``silu(gate) * up``, or ``gelu(up)`` without a gate."""
    if fused(up_CF):
        from sppo.kernels.triton import activations

        return activations.activation(gate_CF, up_CF, kind=kind)
    if kind == "swiglu":
        assert gate_CF is not None, "swiglu has a gate"
        return functional.silu(gate_CF).mul_(up_CF)
    return functional.gelu(up_CF, approximate=_APPROXIMATE[kind])


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
        gate = None if gate_CF is None else gate_CF[rows]
        _activation_backward_(dhidden_CF[rows], gate, up_CF[rows], kind=kind)
    return ActivationGradient(up_CF, gate_CF, dhidden_CF)


def _activation_backward_(
    dhidden_tF: Tensor, gate_tF: Tensor | None, up_tF: Tensor, *, kind: Activation
) -> None:
    """Turn dhidden into dup, gate into dgate and up into the activation's output, for one tile."""
    if kind == "swiglu":
        assert gate_tF is not None, "swiglu has a gate"
        silu = functional.silu(gate_tF)
        gate_tF.copy_(torch.ops.aten.silu_backward(dhidden_tF * up_tF, gate_tF))
        dhidden_tF.mul_(silu)
        up_tF.mul_(silu)
        return
    approximate = _APPROXIMATE[kind]
    dhidden_tF.copy_(torch.ops.aten.gelu_backward(dhidden_tF, up_tF, approximate=approximate))
    up_tF.copy_(functional.gelu(up_tF, approximate=approximate))


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
