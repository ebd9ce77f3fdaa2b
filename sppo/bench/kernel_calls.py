"""Calls of element-wise kernels by the planner's names, with operands of a given size.

Operands have ``elements`` elements, in rows of the width of a small model on a CPU and of a large
model on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from sppo.bench.operands import Operands
from sppo.bench.timing import Call
from sppo.config.run import OptimizerConfig
from sppo.kernels import elementwise
from sppo.kernels.cross_entropy import losses_to_gradient_
from sppo.kernels.elementwise import Activation
from sppo.kernels.gradient_norm import scale_, total_norm
from sppo.kernels.linear import accumulate_bias_gradient
from sppo.kernels.rotary import RotaryTable, rotate
from sppo.optim.fused_adamw import FusedAdamW

Maker = Callable[[Operands, torch.dtype, int], Call]

_WIDTH = {"cpu": 512, "cuda": 4096}
_HEAD_SIZE = {"cpu": 64, "cuda": 128}
_HEADS = 8
_VOCABULARY = 4096
_PARAMETERS = 16
"""Number of tensors that the optimizer updates."""
_STACK_BYTES = 1 << 28
"""Size larger than caches, so that saved tensors are evicted as in training."""
_EPS = 1e-6


def _rows(operands: Operands, dtype: torch.dtype, elements: int) -> Tensor:
    width = _WIDTH[operands.device]
    return operands.take(elements // width, width, dtype=dtype)


def _heads(operands: Operands, dtype: torch.dtype, elements: int) -> Tensor:
    size = _HEAD_SIZE[operands.device]
    return operands.take(elements // (_HEADS * size), _HEADS, size, dtype=dtype)


def _rmsnorm(operands: Operands, dtype: torch.dtype, elements: int, *, by_head: bool) -> Call:
    x = (_heads if by_head else _rows)(operands, dtype, elements)
    weight = operands.take(x.shape[-1], dtype=dtype)
    return lambda: elementwise.rms_norm(x, weight, eps=_EPS)


def _rmsnorm_backward(
    operands: Operands, dtype: torch.dtype, elements: int, *, by_head: bool
) -> Call:
    x, dy = ((_heads if by_head else _rows)(operands, dtype, elements) for _ in range(2))
    weight = operands.take(x.shape[-1], dtype=dtype)
    return lambda: elementwise.rms_norm_backward(dy, x, weight, eps=_EPS)


def _add_rmsnorm(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    total, x = (_rows(operands, dtype, elements) for _ in range(2))
    weight = operands.take(x.shape[-1], dtype=dtype)
    return lambda: elementwise.add_rms_norm_(total, x, weight, eps=_EPS)


def _add_rmsnorm_backward(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    x, dy, dresidual = (_rows(operands, dtype, elements) for _ in range(3))
    weight = operands.take(x.shape[-1], dtype=dtype)
    return lambda: elementwise.rms_norm_backward(dy, x, weight, eps=_EPS, dresidual_CE=dresidual)


def _layernorm(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    x = _rows(operands, dtype, elements)
    weight, bias = (operands.take(x.shape[-1], dtype=dtype) for _ in range(2))
    return lambda: elementwise.layer_norm(x, weight, bias, eps=_EPS)


def _layernorm_backward(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    x, dy = (_rows(operands, dtype, elements) for _ in range(2))
    weight, bias = (operands.take(x.shape[-1], dtype=dtype) for _ in range(2))
    return lambda: elementwise.layer_norm_backward(dy, x, weight, bias, eps=_EPS)


def _add_layernorm(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    total, x = (_rows(operands, dtype, elements) for _ in range(2))
    weight, bias = (operands.take(x.shape[-1], dtype=dtype) for _ in range(2))
    return lambda: elementwise.add_layer_norm_(total, x, weight, bias, eps=_EPS)


def _add_layernorm_backward(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    x, dy, dresidual = (_rows(operands, dtype, elements) for _ in range(3))
    weight, bias = (operands.take(x.shape[-1], dtype=dtype) for _ in range(2))
    return lambda: elementwise.layer_norm_backward(
        dy, x, weight, bias, eps=_EPS, dresidual_CE=dresidual
    )


def _rotary(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    x = _heads(operands, dtype, elements)
    cos, sin = (
        operands.take(x.shape[0], 1, x.shape[2] // 2, dtype=torch.float32) for _ in range(2)
    )
    table = RotaryTable(cos, sin)
    return lambda: rotate(x, table)


def _activation(operands: Operands, dtype: torch.dtype, elements: int, *, kind: Activation) -> Call:
    up = _rows(operands, dtype, elements)
    gate = _rows(operands, dtype, elements) if kind == "swiglu" else None
    return lambda: elementwise.activation(gate, up, kind=kind)


def _activation_backward(
    operands: Operands, dtype: torch.dtype, elements: int, *, kind: Activation
) -> Call:
    """Return the call on zeros: in place, other values would shrink to slow denormals."""
    shape = _rows(operands, dtype, elements).shape
    dhidden, gate, up = (operands.zeros(*shape, dtype=dtype) for _ in range(3))
    return lambda: elementwise.activation_backward_(
        dhidden, gate if kind == "swiglu" else None, up, kind=kind
    )


def _add(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    total, x = (_rows(operands, dtype, elements) for _ in range(2))
    return lambda: total.add_(x)


def _copy(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    target, x = (_rows(operands, dtype, elements) for _ in range(2))
    return lambda: target.copy_(x)


def _narrow(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    target, x = (_rows(operands, of, elements) for of in (dtype, torch.float32))
    return lambda: target.copy_(x)


def _save(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    """Return a call that copies to the next place of a long stack each time."""
    x = _rows(operands, dtype, elements)
    places = max(2, _STACK_BYTES // (elements * dtype.itemsize))
    stack = operands.zeros(places, *x.shape, dtype=dtype)
    turn = iter(range(1 << 62))
    return lambda: stack[next(turn) % places].copy_(x)


def _bias_gradient(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    dy = _rows(operands, dtype, elements)
    total = operands.zeros(dy.shape[1], dtype=torch.float32)
    return lambda: accumulate_bias_gradient(total, dy)


def _loss_gradient(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    tokens = elements // _VOCABULARY
    logits = operands.take(tokens, _VOCABULARY, dtype=dtype).clone()  # overwritten by the call
    labels = torch.arange(tokens, device=operands.device) % _VOCABULARY
    return lambda: losses_to_gradient_(logits, labels, scale=1.0)


def _adamw(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    """Return the call of a step's work on fp32 parameters: see ``adamw`` in PASSES."""
    shape = (_PARAMETERS, elements // _PARAMETERS)
    parameters = [row.clone() for row in operands.take(*shape, dtype=torch.float32)]
    gradients, *moments = ([torch.zeros_like(row) for row in parameters] for _ in range(3))
    config = OptimizerConfig()
    update = FusedAdamW(parameters, moments, config=config, weight_decay=config.weight_decay)
    factor = torch.full((), 0.5, device=operands.device)  # a GPU skips scaling by one

    def step() -> None:
        torch._foreach_zero_(gradients)
        total_norm(gradients)
        scale_(gradients, factor)
        update.step(gradients, lr=config.lr)

    return step


MAKERS: Mapping[str, Maker] = {
    "rmsnorm": partial(_rmsnorm, by_head=False),
    "rmsnorm_backward": partial(_rmsnorm_backward, by_head=False),
    "rmsnorm_add": _add_rmsnorm,
    "rmsnorm_add_backward": _add_rmsnorm_backward,
    "layernorm": _layernorm,
    "layernorm_backward": _layernorm_backward,
    "layernorm_add": _add_layernorm,
    "layernorm_add_backward": _add_layernorm_backward,
    "head_norm": partial(_rmsnorm, by_head=True),
    "head_norm_backward": partial(_rmsnorm_backward, by_head=True),
    "rotary": _rotary,
    "add": _add,
    "copy": _copy,
    "narrow": _narrow,
    "save": _save,
    "bias_gradient": _bias_gradient,
    **{kind: partial(_activation, kind=kind) for kind in get_args(Activation)},
    **{
        f"{kind}_backward": partial(_activation_backward, kind=kind)
        for kind in get_args(Activation)
    },
    "loss_gradient": _loss_gradient,
    "adamw": _adamw,
}
"""Functions that build the call of each kernel in :data:`sppo.cost.elementwise.PASSES`."""
