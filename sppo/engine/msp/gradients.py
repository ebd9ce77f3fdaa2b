"""Weight gradients of MSP shards, which return to the owner of the stage product by product.

A borrower holds the gradients of a few parameters at a time. If tokens are sharded over
sequence-parallel ranks, gradients are summed over the borrower's group before each of its ranks
sends its part of the rows to the owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sppo.cost.live_sets.shard_live_sets import MOST_GRADIENTS_SENT
from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.grouped import accumulate_grouped_weight_gradient_
from sppo.kernels.linear import accumulate_bias_gradient, accumulate_weight_gradient
from sppo.parallel.msp_exchange import MspExchange


class SharedGradients:
    """:class:`sppo.model.gradients.GradientSink` that sums over the shards, at the owner.

    Args:
        exchange: Communication with the ranks of the other shards.
        totals: The owner's fp32 sums of the layer by local name; None on a borrower.
        shapes: Shapes of the layer's parameters that train, by local name.
        dtype: Type of the weights.
        device: Device of the gradients.
    """

    takes_tiles = False
    """Every gradient is sent once."""

    def __init__(
        self,
        exchange: MspExchange,
        *,
        totals: Mapping[str, Tensor] | None,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._exchange, self._totals, self._shapes = exchange, totals, shapes
        self._dtype, self._device = accumulation_dtype(dtype), device
        self._members = exchange.members
        self._under_way: deque[tuple[str, Tensor, Any]] = deque()

    def trains(self, name: str) -> bool:
        """Return whether the parameter trains."""
        return name in self._shapes

    def product(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Compute the gradient of a matrix; start to sum it at the owner."""
        weight = self._sum(name)
        accumulate_weight_gradient(weight, dy_CO, x_CI)
        self._send(name, weight)

    def expert_products(self, name: str, *, dy_RO: Tensor, x_RI: Tensor, offsets_X: Tensor) -> None:
        """Compute the gradients of stacked matrices; start to sum them at the owner."""
        stacked = self._sum(name)
        accumulate_grouped_weight_gradient_(stacked, dy_RO, x_RI, offsets_X)
        self._send(name, stacked)

    def token_sum(self, name: str, *, dy_CO: Tensor) -> None:
        """Compute the gradient of a bias; start to sum it at the owner."""
        bias = self._sum(name)
        accumulate_bias_gradient(bias, dy_CO)
        self._send(name, bias)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a parameter's gradient and start to sum it at the owner."""
        self._send(name, self._sum(name).add_(gradient))

    def finish(self) -> None:
        """Wait until all gradients are summed at the owner."""
        self._wait_for(0)

    def _sum(self, name: str) -> Tensor:
        """Return the tensor this rank adds to: the totals on the owner, zeros on a borrower."""
        if self._totals is not None:
            return self._totals[name]
        return torch.zeros(self._shapes[name], dtype=self._dtype, device=self._device)

    def _send(self, name: str, gradient: Tensor) -> None:
        """Start to reduce a gradient to the owner, whose totals already have its own part."""
        if self._totals is not None:
            part = torch.zeros_like(self._members.own_rows(gradient))
        else:
            self._members.add_up(gradient)
            part = self._members.own_rows(gradient)
        if part.shape[0]:
            work = self._exchange.to_owner_ahead(part)
            self._under_way.append((name, part, work))
        self._wait_for(MOST_GRADIENTS_SENT)

    def _wait_for(self, most: int) -> None:
        while len(self._under_way) > most:
            name, part, work = self._under_way.popleft()
            work.wait()
            if self._totals is not None:
                self._members.own_rows(self._totals[name]).add_(part)
