"""Embedding and head of MSP shards: the owner of the stage computes them for all shards at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.engine.model_ends import Ends
from sppo.engine.msp.shard import as_shard
from sppo.engine.unit import Unit


@dataclass(frozen=True, slots=True)
class SharedEnds:
    """:class:`sppo.engine.model_ends.Ends` of shards.

    Attributes:
        own: Embedding and head of whole units; used on the owner of the stage.
        hidden_size: E, the width of inputs and outputs.
        dtype: Type of inputs and outputs.
        device: Device of all tensors.
    """

    own: Ends
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def embed(self, unit: Unit) -> Tensor:
        """Return this shard of the first stage's input, computed and scattered by the owner."""
        shard = as_shard(unit)
        return self._scattered(
            unit, self.own.embed(shard.whole) if shard.exchange.is_owner else None
        )

    def embed_backward(self, unit: Unit, dx_CE: Tensor) -> None:
        """Gather the gradient of the first stage's input; the owner adds embedding gradients."""
        shard = as_shard(unit)
        whole_CE = shard.exchange.gather(dx_CE, shard.sizes)
        if whole_CE is not None:
            self.own.embed_backward(shard.whole, whole_CE)

    def loss(self, unit: Unit, x_CE: Tensor, loss_scale: float | None) -> None:
        """Gather the last stage's output at the owner, which computes the losses."""
        shard = as_shard(unit)
        whole_CE = shard.exchange.gather(x_CE, shard.sizes)
        if whole_CE is not None:
            self.own.loss(shard.whole, whole_CE, loss_scale)

    def take_loss_gradient(self, unit: Unit) -> Tensor:
        """Return this shard of the gradient that the last stage's owner computed in forward."""
        shard = as_shard(unit)
        whole_CE = self.own.take_loss_gradient(shard.whole) if shard.exchange.is_owner else None
        return self._scattered(unit, whole_CE)

    def _scattered(self, unit: Unit, whole_CE: Tensor | None) -> Tensor:
        """Return this shard's rows of the owner's tensor of the whole unit."""
        shard = as_shard(unit)
        shape = (shard.tokens_C.shape[0], self.hidden_size)
        own = torch.empty(shape, dtype=self.dtype, device=self.device)
        parts = None if whole_CE is None else list(torch.split(whole_CE, list(shard.sizes)))
        return shard.exchange.scatter(parts, own)
