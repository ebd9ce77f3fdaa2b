"""Weights and weight gradients of a stage on the ranks that run MSP shards of its units.

While a layer computes, the owner sends the next layer: a borrower holds at most two layers'
weights, never a second copy of a stage. Weight gradients return to the owner product by product, so
a borrower holds the gradients of a few parameters at a time.

If tokens are sharded over G sequence-parallel ranks, each rank of the owner's group sends 1/G of
the rows to one rank of the borrower's group. The borrower's ranks then exchange rows among
themselves, over links that are faster than the links between stages. Likewise gradients are summed
over the borrower's group before each of its ranks sends its rows to the owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.cost.parameters import layer_shapes
from sppo.engine.providers.weights import WeightPart, WeightProvider
from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.linear import accumulate_bias_gradient, accumulate_weight_gradient
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.msp_exchange import MspExchange, TokenMembers

_MOST_UNDER_WAY = 2
"""Most parameters whose gradients are in flight to the owner at once."""


class MspWeights:
    """:class:`sppo.engine.providers.weights.WeightProvider` of one stage, while one MSP shard runs.

    Args:
        model: Model configuration.
        own: Provider of the owner's weights; None on a borrower.
        members: Ranks over which this rank's tokens are sharded.
        dtype: Type of the weights.
        device: Device of the weights.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        own: WeightProvider | None,
        members: TokenMembers,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = layer_shapes(model)
        self._own, self._members = own, members
        self.dtype, self.device = dtype, device
        self._coming: deque[tuple[WeightPart, dict[str, Tensor], list[Any]]] = deque()
        self._in_use: dict[str, Tensor] = {}
        self._order: deque[WeightPart] = deque()
        self._exchange: MspExchange | None = None
        self._also: Callable[[int], Sequence[Tensor]] = lambda layer: ()
        self._held_layers = 0
        self.most_layers = 0
        """Peak number of layers whose weights a borrower held at once."""

    def connect(
        self,
        exchange: MspExchange,
        *,
        also: Callable[[int], Sequence[Tensor]] = lambda layer: (),
    ) -> None:
        """Set the ranks with which the next :meth:`begin` exchanges weights.

        Args:
            exchange: Communication with the ranks of the other shards.
            also: Function that maps a layer to further tensors to broadcast with its weights.
        """
        self._exchange, self._also = exchange, also

    def begin(self, visits: Iterable[WeightPart]) -> None:
        """Announce the layers that one shard takes, in order, and start to send the first."""
        assert not self._coming, "one shard at a time"
        assert not self._order, "one shard at a time"
        self._order.extend(visits)
        self._send_next()

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the weights of layer ``part`` by local name; start to send the next layer."""
        self._send_next()
        coming, weights, works = self._coming.popleft()
        assert coming == part, f"layer {part} is wanted, {coming} comes"
        with peer_errors("waiting for the weights of a layer from the owner of its stage"):
            for work in works:
                work.wait()
        if self._own is None:
            self._members.put_together(list(weights.values()))
            self._in_use = weights
        return weights

    def release(self, part: WeightPart) -> None:
        """Release the layer taken last; a borrower frees it even if the stage holds the dict."""
        self._held_layers -= 1
        self._in_use.clear()

    def take_peak_bytes(self) -> int:
        """Return 0: `most_layers` counts the layers held instead."""
        return 0

    def _send_next(self) -> None:
        if not self._order:
            return
        assert self._exchange is not None, "connect() comes first"
        layer = self._order.popleft()
        assert isinstance(layer, int), "embedding and head stay with the owner"
        if self._own is not None:
            weights = dict(self._own.take(layer))
        else:
            weights = {
                name: torch.empty(shape, dtype=self.dtype, device=self.device)
                for name, shape in self._shapes.items()
            }
        self._held_layers += 1
        if self._own is None:
            self.most_layers = max(self.most_layers, self._held_layers)
        parts = (self._members.own_rows(weights[name]) for name in self._shapes)
        works = self._exchange.send_ahead([p for p in parts if p.shape[0]] + [*self._also(layer)])
        self._coming.append((layer, weights, works))


class MspGradients:
    """:class:`sppo.model.gradients.GradientSink` that sums over the shards, at the owner.

    Args:
        exchange: Communication with the ranks of the other shards.
        totals: The owner's fp32 sums of the layer by local name; None on a borrower.
        members: Ranks over which this rank's tokens are sharded.
        shapes: Shapes of the layer's parameters by local name.
        dtype: Type of the weights.
        device: Device of the gradients.
    """

    def __init__(
        self,
        exchange: MspExchange,
        *,
        totals: Mapping[str, Tensor] | None,
        members: TokenMembers,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._exchange, self._totals, self._shapes = exchange, totals, shapes
        self._dtype, self._device, self._members = accumulation_dtype(dtype), device, members
        self._under_way: deque[tuple[str, Tensor, Any]] = deque()

    def linear(self, name: str, *, dy_CO: Tensor, x_CI: Tensor) -> None:
        """Compute weight and bias gradients of a linear layer; start to sum them at the owner."""
        weight = self._sum(f"{name}.weight")
        accumulate_weight_gradient(weight, dy_CO, x_CI)
        self._send(f"{name}.weight", weight)
        if f"{name}.bias" in self._shapes:
            bias = self._sum(f"{name}.bias")
            accumulate_bias_gradient(bias, dy_CO)
            self._send(f"{name}.bias", bias)

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
        self._wait_for(_MOST_UNDER_WAY)

    def _wait_for(self, most: int) -> None:
        while len(self._under_way) > most:
            name, part, work = self._under_way.popleft()
            with peer_errors("adding up a piece's weight gradients"):
                work.wait()
            if self._totals is not None:
                self._members.own_rows(self._totals[name]).add_(part)
