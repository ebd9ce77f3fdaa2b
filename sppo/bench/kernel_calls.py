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
from sppo.config.model import GATED_ACTIVATIONS, Activation
from sppo.config.optimizer import OptimizerConfig
from sppo.cost.parameter_groups import UpdateRule
from sppo.kernels import elementwise
from sppo.kernels.cross_entropy import token_losses
from sppo.kernels.linear import accumulate_bias_gradient
from sppo.kernels.norm_parameters import NormParameters
from sppo.kernels.rotary import RotaryTable, rotate
from sppo.kernels.sinks import apply_sinks_, sink_gradient
from sppo.optim.fused_adamw import FusedAdamW
from sppo.optim.gradient_norm import global_norm

Maker = Callable[[Operands, torch.dtype, int], Call]
Shape = Callable[[str, int], tuple[int, ...]]
"""Function of a device and a number of elements that returns the shape of a kernel's operands."""

_WIDTH = {"cpu": 512, "cuda": 4096}
_HEAD_SIZE = {"cpu": 64, "cuda": 128}
_HEADS = 8
_VOCABULARY = 4096
_PARAMETERS = 16
"""Number of tensors that the optimizer updates."""
_STACK_BYTES = 1 << 28
"""Size larger than caches, so that saved tensors are evicted as in training."""
_EPS = 1e-6


def _rows(device: str, elements: int) -> tuple[int, ...]:
    return elements // _WIDTH[device], _WIDTH[device]


def _heads(device: str, elements: int) -> tuple[int, ...]:
    return elements // (_HEADS * _HEAD_SIZE[device]), _HEADS, _HEAD_SIZE[device]


def _kernel(
    call: Callable[..., object], *, tensors: int = 0, vectors: int = 0, shape: Shape = _rows
) -> Maker:
    """Return the maker of a kernel's call.

    Args:
        call: Kernel, called with the tensors, and a norm also with its parameters.
        tensors: Number of operands of all elements.
        vectors: 1 for a norm with a weight, 2 for one with a bias as well, 0 for another kernel.
        shape: Shape of the tensors.
    """

    def make(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
        full = shape(operands.device, elements)
        found: list[object] = [operands.take(*full, dtype=dtype) for _ in range(tensors)]
        if vectors:
            weight, *bias = (operands.take(*full[-1:], dtype=dtype) for _ in range(vectors))
            found.append(NormParameters(weight, bias[0] if bias else None, _EPS))
        return partial(call, *found)

    return make


def _add_norm_backward(
    dy: Tensor, x: Tensor, dresidual: Tensor, parameters: NormParameters
) -> object:
    return elementwise.norm_backward(dy, x, parameters, dresidual_CE=dresidual)


def _rotary(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    x = operands.take(*_heads(operands.device, elements), dtype=dtype)
    angles = x.shape[0], 1, x.shape[2] // 2
    table = RotaryTable(*(operands.take(*angles, dtype=torch.float32) for _ in range(2)))
    return lambda: rotate(x, table)


def _sinks(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    o = operands.zeros(*_heads(operands.device, elements), dtype=dtype)
    lse, sinks = _sums(operands, o)
    return lambda: apply_sinks_(o, lse, sinks)


def _sink_gradient(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    do, o = (operands.take(*_heads(operands.device, elements), dtype=dtype) for _ in range(2))
    lse, sinks = _sums(operands, o)
    return lambda: sink_gradient(do, o, lse, sinks)


def _sums(operands: Operands, o_CND: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-sum-exps and sinks for the output of attention."""
    tokens, heads = o_CND.shape[:2]
    lse = operands.take(heads, tokens, dtype=torch.float32)
    return lse, operands.take(heads, dtype=o_CND.dtype)


def _activation(kind: Activation) -> Maker:
    if kind in GATED_ACTIVATIONS:
        return _kernel(partial(elementwise.activation, kind=kind), tensors=2)
    return _kernel(partial(elementwise.activation, None, kind=kind), tensors=1)


def _activation_backward(kind: Activation) -> Maker:
    """Return the maker of calls on zeros: in place, other values would shrink to slow denormals."""

    def make(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
        shape = _rows(operands.device, elements)
        dhidden, gate, up = (operands.zeros(*shape, dtype=dtype) for _ in range(3))
        gates = gate if kind in GATED_ACTIVATIONS else None
        return lambda: elementwise.activation_backward_(dhidden, gates, up, kind=kind)

    return make


def _narrow(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    shape = _rows(operands.device, elements)
    target, x = (operands.take(*shape, dtype=of) for of in (dtype, torch.float32))
    return lambda: target.copy_(x)


def _save(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    """Return a call that copies to the next place of a long stack each time."""
    x = operands.take(*_rows(operands.device, elements), dtype=dtype)
    places = max(2, _STACK_BYTES // (elements * dtype.itemsize))
    stack = operands.zeros(places, *x.shape, dtype=dtype)
    turn = iter(range(1 << 62))
    return lambda: stack[next(turn) % places].copy_(x)


def _bias_gradient(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    dy = operands.take(*_rows(operands.device, elements), dtype=dtype)
    total = operands.zeros(dy.shape[1], dtype=torch.float32)
    return lambda: accumulate_bias_gradient(total, dy)


def _loss_gradient(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    tokens = elements // _VOCABULARY
    logits = operands.take(tokens, _VOCABULARY, dtype=dtype).clone()  # overwritten by the call
    labels = torch.arange(tokens, device=operands.device) % _VOCABULARY
    return lambda: token_losses(logits, labels, scale=1.0)


def _adamw(operands: Operands, dtype: torch.dtype, elements: int) -> Call:
    """Return the call of a step's work on fp32 parameters: see ``adamw`` in PASSES."""
    shape = (_PARAMETERS, elements // _PARAMETERS)
    parameters = [row.clone() for row in operands.take(*shape, dtype=torch.float32)]
    gradients, *moments = ([torch.zeros_like(row) for row in parameters] for _ in range(3))
    config = OptimizerConfig()
    rule = UpdateRule(1.0, config.weight_decay)
    update = FusedAdamW(parameters, moments, config=config, rule=rule)
    named = {str(index): gradient for index, gradient in enumerate(gradients)}
    factor = torch.full((), 0.5, device=operands.device)  # a GPU skips scaling by one

    def step() -> None:
        torch._foreach_zero_(gradients)
        global_norm(named)
        torch._foreach_mul_(gradients, factor)
        update.step(gradients, lr=config.lr)

    return step


MAKERS: Mapping[str, Maker] = {
    "rmsnorm": _kernel(elementwise.norm, tensors=1, vectors=1),
    "rmsnorm_backward": _kernel(elementwise.norm_backward, tensors=2, vectors=1),
    "rmsnorm_add": _kernel(elementwise.add_norm_, tensors=2, vectors=1),
    "rmsnorm_add_backward": _kernel(_add_norm_backward, tensors=3, vectors=1),
    "layernorm": _kernel(elementwise.norm, tensors=1, vectors=2),
    "layernorm_backward": _kernel(elementwise.norm_backward, tensors=2, vectors=2),
    "layernorm_add": _kernel(elementwise.add_norm_, tensors=2, vectors=2),
    "layernorm_add_backward": _kernel(_add_norm_backward, tensors=3, vectors=2),
    "head_norm": _kernel(elementwise.norm, tensors=1, vectors=1, shape=_heads),
    "head_norm_backward": _kernel(elementwise.norm_backward, tensors=2, vectors=1, shape=_heads),
    "rotary": _rotary,
    "add": _kernel(Tensor.add_, tensors=2),
    "scale": _kernel(lambda x: x.mul_(1.0), tensors=1),
    "sinks": _sinks,
    "sink_gradient": _sink_gradient,
    "copy": _kernel(Tensor.copy_, tensors=2),
    "narrow": _narrow,
    "save": _save,
    "bias_gradient": _bias_gradient,
    **{kind: _activation(kind) for kind in get_args(Activation)},
    **{f"{kind}_backward": _activation_backward(kind) for kind in get_args(Activation)},
    "loss_gradient": _loss_gradient,
    "adamw": _adamw,
}
"""Functions that build the call of each kernel of :mod:`sppo.cost.elementwise`, by name."""
