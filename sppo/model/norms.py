"""Norms of a model by the names of their parameters, forward and backward.

Legend: C tokens, E hidden. The q- and k-norms have rows of heads, ``[C, H, D]``, or of all heads,
``[C, H D]``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.kernels import elementwise
from sppo.kernels.norm_parameters import NormParameters
from sppo.model.gradients import GradientSink


def norm(model: ModelConfig, name: str, x_CE: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the model's norm of ``x_CE`` with the parameters called ``name``."""
    return elementwise.norm(x_CE, _parameters(model, name, weights))


def add_norm_(
    model: ModelConfig, name: str, total_CE: Tensor, x_CE: Tensor, weights: Mapping[str, Tensor]
) -> Tensor:
    """Add ``x_CE`` to ``total_CE`` in place and return the :func:`norm` of the sum."""
    return elementwise.add_norm_(total_CE, x_CE, _parameters(model, name, weights))


def norm_backward(
    model: ModelConfig,
    name: str,
    dy_CE: Tensor,
    x_CE: Tensor,
    weights: Mapping[str, Tensor],
    gradients: GradientSink,
    *,
    dresidual_CE: Tensor | None = None,
) -> Tensor:
    """Return the gradient of :func:`norm`'s input; add those of parameters that train to a sink.

    The result includes ``dresidual_CE``, the gradient through the residual connection.
    """
    names = (f"{name}.weight", f"{name}.bias")
    dx, *found = elementwise.norm_backward(
        dy_CE,
        x_CE,
        _parameters(model, name, weights),
        dresidual_CE=dresidual_CE,
        with_parameters=any(map(gradients.trains, names)),
    )
    for parameter, gradient in zip(names, found, strict=True):
        if gradient is not None and gradients.trains(parameter):
            gradients.add(parameter, gradient)
    return dx


def is_offset(model: ModelConfig, name: str) -> bool:
    """Return whether 1 is added to the weight of a norm: never in linear attention."""
    return model.norm_offset and not name.startswith("linear_norm")


def _parameters(model: ModelConfig, name: str, weights: Mapping[str, Tensor]) -> NormParameters:
    """Return the parameters called ``name``; only LayerNorm has a bias."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    return NormParameters(weight, bias, model.norm_eps, is_offset(model, name))
