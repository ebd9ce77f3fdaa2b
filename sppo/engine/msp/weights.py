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
from sppo.parallel.flat_row import FlatRow, Shapes
from sppo.parallel.msp_exchange import MspExchange


class SharedWeights:
    """:class:`sppo.engine.providers.weights.PartProvider` of one pass of one shard.

    Starts to send the first layer at once.

    Args:
        exchange: Communication with the ranks of the other shards.
        layers: Layers of the pass, in order.
        own: Provider of this rank's stages, from which the owner sends; it tells a borrower the
            type and device.
        rows: Function that returns the shapes of a layer's parameters by local name, for each of
            the layer's rows.
        beside: Function that maps a layer to further tensors to broadcast with its weights.
    """

    def __init__(
        self,
        exchange: MspExchange,
        layers: Sequence[int],
        *,
        own: WeightProvider,
        rows: Callable[[int], Sequence[Shapes]],
        beside: Callable[[int], Sequence[Tensor]],
    ) -> None:
        self._exchange, self._order, self._own = exchange, deque(layers), own
        self._rows, self._beside = rows, beside
        self._coming: deque[tuple[int, list[tuple[FlatRow, Tensor]], list[Any]]] = deque()
        self._in_use: dict[str, Tensor] = {}
        self._send_next()

    def take(self, part: WeightPart) -> Mapping[str, Tensor]:
        """Return the weights of layer ``part`` by local name; start to send the next layer."""
        self._send_next()
        coming, rows, works = self._coming.popleft()
        assert coming == part, f"layer {part} is wanted, {coming} comes"
        for work in works:
            work.wait()
        self._in_use = {}
        for layout, row in rows:
            if not self._exchange.is_owner:
                self._exchange.members.put_together(row, layout)
            self._in_use |= layout.views(row)
        return self._in_use

    def release(self, part: WeightPart) -> None:
        """Release the layer taken last; a borrower frees it even if the stage holds the dict."""
        self._in_use.clear()

    def _send_next(self) -> None:
        if not self._order:
            return
        layer = self._order.popleft()
        layouts = [self._exchange.members.layout(shapes) for shapes in self._rows(layer)]
        # The owner's rows are padded for more ranks, so at least as long.
        is_owner = self._exchange.is_owner
        rows = self._own.rows_of(layer) if is_owner else [*map(self._empty_row, layouts)]
        coming = [*zip(layouts, rows, strict=True)]
        parts = [row[layout.own] for layout, row in coming]
        works = self._exchange.send_ahead([*parts, *self._beside(layer)])
        self._coming.append((layer, coming, works))

    def _empty_row(self, layout: FlatRow) -> Tensor:
        """Return memory for a row of a layer on a borrower."""
        own = self._own
        return torch.empty(layout.padded_elements, dtype=own.dtype, device=own.device)
