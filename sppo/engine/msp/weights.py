"""Weights of the layers of a stage on the ranks that run an MSP shard of one of its units.

While a layer computes, the owner sends the next layer: a borrower holds at most two layers'
weights, never a second copy of a stage.

If tokens are sharded over G sequence-parallel ranks, each rank of the owner's group sends 1/G of
the layer's flat row to one rank of the borrower's group. The borrower's ranks then gather the row
among themselves, over links that are faster than the links between stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sppo.engine.providers.part_rows import WeightPart
from sppo.engine.providers.weights import WeightProvider
from sppo.parallel.msp_exchange import MspExchange


class SharedWeights:
    """:class:`sppo.engine.providers.weights.PartProvider` of one pass of one shard.

    Starts to send the first layer at once.

    Args:
        exchange: Communication with the ranks of the other shards.
        layers: Layers of the pass, in order.
        own: Provider of this rank's stages, from which the owner sends; it tells a borrower the
            type and device.
        shapes: Shapes of a layer's parameters by local name.
        beside: Function that maps a layer to further tensors to broadcast with its weights.
    """

    def __init__(
        self,
        exchange: MspExchange,
        layers: Sequence[int],
        *,
        own: WeightProvider,
        shapes: Mapping[str, tuple[int, ...]],
        beside: Callable[[int], Sequence[Tensor]],
    ) -> None:
        self._exchange, self._order = exchange, deque(layers)
        self._own, self._layout = own, exchange.members.layout(shapes)
        self._beside = beside
        self._coming: deque[tuple[int, Tensor, list[Any]]] = deque()
        self._in_use: dict[str, Tensor] = {}
        self._send_next()

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the weights of layer ``part`` by local name; start to send the next layer."""
        self._send_next()
        coming, row, works = self._coming.popleft()
        assert coming == part, f"layer {part} is wanted, {coming} comes"
        for work in works:
            work.wait()
        if not self._exchange.is_owner:
            self._exchange.members.put_together(row, self._layout)
        self._in_use = self._layout.views(row)
        return self._in_use

    def release(self, part: WeightPart) -> None:
        """Release the layer taken last; a borrower frees it even if the stage holds the dict."""
        self._in_use.clear()

    def _send_next(self) -> None:
        if not self._order:
            return
        layer = self._order.popleft()
        # The owner's row is padded for more ranks, so at least as long.
        row = self._own.row(layer) if self._exchange.is_owner else self._empty_row()
        works = self._exchange.send_ahead([row[self._layout.own], *self._beside(layer)])
        self._coming.append((layer, row, works))

    def _empty_row(self) -> Tensor:
        """Return memory for a layer's weights on a borrower."""
        own = self._own
        return torch.empty(self._layout.padded_elements, dtype=own.dtype, device=own.device)
