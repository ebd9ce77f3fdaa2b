"""Sinks of a layer's weight gradients: fp32 sums at once, or products deferred until later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.linear import accumulate_bias_gradient, accumulate_weight_gradient


class GradientSink(Protocol):
    """Receiver of the weight gradients of one layer, by parameter name within the layer."""

    def linear(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Take the operands of the gradients of ``name.weight`` and, if present, ``name.bias``.

        The sink owns both operands from this call on and may read them after the layer's backward,
        so the caller must neither overwrite nor reuse their memory.
        """
        ...

    def add(self, name: str, gradient: Tensor) -> None:
        """Take the finished gradient of the parameter ``name``."""
        ...


class GradientSum:
    """Sink that adds every gradient immediately to the given fp32 buffers."""

    def __init__(self, totals: Mapping[str, Tensor]) -> None:
        self._totals = totals

    def linear(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Add the product ``dy.T @ x`` to the weight's sum, and the sum of dy to the bias's."""
        accumulate_weight_gradient(self._totals[f"{name}.weight"], dy_CO, x_CI)
        bias = self._totals.get(f"{name}.bias")
        if bias is not None:
            accumulate_bias_gradient(bias, dy_CO)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to its sum."""
        self._totals[name].add_(gradient)


def zero_gradients(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeroed gradient buffers by name, in fp32, or float64 for float64 weights."""
    return {
        name: torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        for name, weight in weights.items()
    }


class DeferredGradients:
    """Sink that stores gradients and the operands of products until :meth:`add_up`.

    Separates the weight-gradient half of a backward (zero bubble, Qi et al., 2024): :meth:`linear`
    stores its operands, which the sink owns (:class:`GradientSink`), and :meth:`add_up` multiplies
    them. Saved tensors in memory of a store are copied before the layer's backward begins, by
    :meth:`sppo.offload.block_store.BlockStore.get`. The small gradients of norms are
    stored as well, so that all gradients of a layer are added at one time.
    """

    def __init__(self) -> None:
        self._operands: list[tuple[str, Tensor, Tensor]] = []
        self._finished: list[tuple[str, Tensor]] = []

    def linear(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Store both operands of the product until :meth:`add_up`."""
        self._operands.append((name, dy_CO, x_CI))

    def add(self, name: str, gradient: Tensor) -> None:
        """Store a finished gradient until :meth:`add_up`."""
        self._finished.append((name, gradient))

    @property
    def operand_bytes(self) -> int:
        """Bytes of the stored operands; an operand of several products counts once."""
        operands = {t.data_ptr(): t for _, *pair in self._operands for t in pair}
        return sum(t.numel() * t.element_size() for t in operands.values())

    def add_up(self, sink: GradientSink) -> None:
        """Give all stored gradients and products to ``sink``; clear them."""
        for name, gradient in self._finished:
            sink.add(name, gradient)
        for name, dy_CO, x_CI in self._operands:
            sink.linear(name, dy_CO=dy_CO, x_CI=x_CI)
        self._finished.clear()
        self._operands.clear()
