"""Sinks of a layer's weight gradients: fp32 sums at once, or products deferred until later.

A sink is given the gradients of parameters that train only; the others are frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from sppo.cost.trainable import EVERYTHING, Trainable
from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.grouped import accumulate_grouped_weight_gradient_
from sppo.kernels.linear import accumulate_bias_gradient, accumulate_weight_gradient


class GradientSink(Protocol):
    """Receiver of the weight gradients of one layer, by parameter name within the layer.

    The sink owns all operands that it is given and may read them after the layer's backward, so the
    caller must neither overwrite nor reuse their memory.
    """

    @property
    def takes_tiles(self) -> bool:
        """True if :meth:`expert_products` may be called for every tile of tokens."""
        ...

    def trains(self, name: str) -> bool:
        """Return whether the gradient of the parameter ``name`` is to be given to the sink."""
        ...

    def product(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Take the operands of the gradient ``dy.T @ x`` of the matrix ``name``."""
        ...

    def expert_products(self, name: str, *, dy_RO: Tensor, x_RI: Tensor, offsets_X: Tensor) -> None:
        """Take the operands of the gradients ``dy.T @ x`` of the stacked matrices ``name``.

        Args:
            name: Parameter ``[X, O, I]``, or ``[X, O]`` for an ``x_RI`` of one column.
            dy_RO: Gradients of rows that are sorted by expert.
            x_RI: Inputs of these rows.
            offsets_X: End of the rows of each expert, int32.
        """
        ...

    def token_sum(self, name: str, *, dy_CO: Tensor) -> None:
        """Take the operand of the gradient of the bias ``name``, the sum of dy over tokens."""
        ...

    def add(self, name: str, gradient: Tensor) -> None:
        """Take the finished gradient of the parameter ``name``."""
        ...


class GradientSum:
    """Sink that adds every gradient immediately to the given fp32 buffers.

    Args:
        totals: Buffers of the parameters that train.
    """

    takes_tiles = True

    def __init__(self, totals: Mapping[str, Tensor]) -> None:
        self._totals = totals

    def trains(self, name: str) -> bool:
        """Return whether the parameter has a buffer."""
        return name in self._totals

    def product(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Add the product ``dy.T @ x`` to the matrix's sum."""
        accumulate_weight_gradient(self._totals[name], dy_CO, x_CI)

    def expert_products(self, name: str, *, dy_RO: Tensor, x_RI: Tensor, offsets_X: Tensor) -> None:
        """Add the product of the rows of each expert to its sum."""
        accumulate_grouped_weight_gradient_(self._totals[name], dy_RO, x_RI, offsets_X)

    def token_sum(self, name: str, *, dy_CO: Tensor) -> None:
        """Add the sum of dy over tokens to the bias's sum."""
        accumulate_bias_gradient(self._totals[name], dy_CO)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to its sum."""
        self._totals[name].add_(gradient)


def zero_gradients(
    weights: Mapping[str, Tensor], *, trainable: Trainable = EVERYTHING
) -> dict[str, Tensor]:
    """Return zeroed gradient buffers by name, in fp32, or float64 for float64 weights.

    Args:
        weights: Weights by global name.
        trainable: Parameters that train; the others get no buffer.
    """
    return {
        name: torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        for name, weight in weights.items()
        if trainable.trains(name)
    }


class DeferredGradients:
    """Sink that stores gradients and the operands of products until :meth:`add_up`.

    Separates the weight-gradient half of a backward (zero bubble, Qi et al., 2024): :meth:`product`
    stores its operands, which the sink owns (:class:`GradientSink`), and :meth:`add_up` multiplies
    them. Saved tensors in memory of a store are copied before the layer's backward begins, by
    :meth:`sppo.offload.block_store.BlockStore.get`. The small gradients of norms are
    stored as well, so that all gradients of a layer are added at one time.

    Args:
        names: Names of the layer's parameters that train.
    """

    takes_tiles = True

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._operands: list[_Deferred] = []
        self._finished: list[tuple[str, Tensor]] = []

    def trains(self, name: str) -> bool:
        """Return whether the parameter trains."""
        return name in self._names

    def product(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Store both operands of the product until :meth:`add_up`."""
        self._operands.append(_Deferred(name, "product", {"dy_CO": dy_CO, "x_CI": x_CI}))

    def expert_products(self, name: str, *, dy_RO: Tensor, x_RI: Tensor, offsets_X: Tensor) -> None:
        """Store the operands of the products until :meth:`add_up`."""
        operands = {"dy_RO": dy_RO, "x_RI": x_RI, "offsets_X": offsets_X}
        self._operands.append(_Deferred(name, "expert_products", operands))

    def token_sum(self, name: str, *, dy_CO: Tensor) -> None:
        """Store the operand of the sum until :meth:`add_up`."""
        self._operands.append(_Deferred(name, "token_sum", {"dy_CO": dy_CO}))

    def add(self, name: str, gradient: Tensor) -> None:
        """Store a finished gradient until :meth:`add_up`."""
        self._finished.append((name, gradient))

    @property
    def operand_bytes(self) -> int:
        """Bytes of the stored operands; an operand of several gradients counts once."""
        stored = (t for deferred in self._operands for t in deferred.operands.values())
        operands = {t.data_ptr(): t for t in stored}
        return sum(t.numel() * t.element_size() for t in operands.values())

    def add_up(self, sink: GradientSink) -> None:
        """Give all stored gradients and operands to ``sink``; clear them."""
        for name, gradient in self._finished:
            sink.add(name, gradient)
        for name, method, operands in self._operands:
            getattr(sink, method)(name, **operands)
        self._finished.clear()
        self._operands.clear()


class _Deferred(NamedTuple):
    """Call of a sink that is made later."""

    name: str
    method: Literal["product", "expert_products", "token_sum"]
    operands: Mapping[str, Tensor]
