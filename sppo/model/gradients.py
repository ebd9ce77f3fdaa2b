"""Sinks of a layer's weight gradients: summed in fp32 in the place they are produced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.linear import accumulate_bias_gradient, accumulate_weight_gradient


class GradientSink(Protocol):
    """Takes the weight gradients of one layer under its local names."""

    def linear(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Take the operands of ``name.weight``'s gradient, and of its bias if it has one.

        The operands become the sink's, which may read them after the layer's backward: nobody
        writes to their memory or lends it to anything else from here on.
        """
        ...

    def add(self, name: str, gradient: Tensor) -> None:
        """A finished gradient of the parameter ``name``."""
        ...


class GradientSum:
    """Adds every gradient at once to the fp32 buffers it was given."""

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
    """Zeroed fp32 (float64 for float64 weights) gradient buffers by name."""
    return {
        name: torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        for name, weight in weights.items()
    }


class DeferredGradients:
    """Keeps gradients and the operands of products until they are wanted.

    The weight-gradient half of a backward (zero bubble, Qi et al., 2024): :meth:`linear` keeps its
    operands, which are its own (:class:`GradientSink`), and :meth:`add_up` multiplies them. Saved
    tensors that a store only lends are copied before the layer's backward begins, by
    :meth:`sppo.engine.saved_tensors.SavedTensors.take_owned`. The small gradients of norms are
    kept as well, so that all of a layer's are added in one place at one time.
    """

    def __init__(self) -> None:
        self._operands: list[tuple[str, Tensor, Tensor]] = []
        self._finished: list[tuple[str, Tensor]] = []

    def linear(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Keep both operands of the product until it is wanted."""
        self._operands.append((name, dy_CO, x_CI))

    def add(self, name: str, gradient: Tensor) -> None:
        """Keep a gradient until the products are made."""
        self._finished.append((name, gradient))

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operands kept; an input of several products counts once."""
        operands = {t.data_ptr(): t for _, *pair in self._operands for t in pair}
        return sum(t.numel() * t.element_size() for t in operands.values())

    def add_up(self, totals: Mapping[str, Tensor]) -> None:
        """Add everything to ``totals``: fp32 buffers by local name."""
        sink = GradientSum(totals)
        for name, gradient in self._finished:
            sink.add(name, gradient)
        for name, dy_CO, x_CI in self._operands:
            sink.linear(name, dy_CO=dy_CO, x_CI=x_CI)
        self._finished.clear()
        self._operands.clear()
