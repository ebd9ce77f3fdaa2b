"""Providers of a stage on the ranks that run MSP shards of its units.

All ranks of an MSP group run the layers of a stage at the same time: the owner sends weights layer
by layer, keys and values are gathered, and gradients return to the owner. Saved tensors stay on the
rank that ran the shard. Embedding and loss run on the owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from sppo.cost.parameters import Shape
from sppo.engine.msp.gradients import SharedGradients
from sppo.engine.msp.shard import MspShard, as_shard
from sppo.engine.msp.shared_kv import SharedKV
from sppo.engine.msp.weights import SharedWeights
from sppo.engine.providers.gradients import gradients_of
from sppo.engine.stage_providers import StageProviders
from sppo.engine.unit import Unit
from sppo.model.gradients import GradientSink


class ShardProviders(StageProviders):
    """Providers of the shards of one stage.

    The weights of the layers are those of the pass that :meth:`begin` began. The owner computes
    embedding and loss for all shards at once.

    Args:
        whole: Providers of the whole units of the rank.
    """

    def __init__(self, whole: StageProviders) -> None:
        super().__init__(
            whole.model,
            whole.own_weights,
            whole.gradients,
            whole.saved,
            whole.kv_store,
            whole.states,
            whole.loss_terms,
            whole.loads,
            whole.results,
            trainable=whole.trainable,
        )
        self._ahead: dict[int, SharedKV] = {}

    def begin(self, unit: Unit, layers: Sequence[int], *, forward: bool) -> None:
        """Start to send the layers to all shards; in forward, with keys and values ahead."""
        shard = as_shard(unit)

        def prefix(layer: int) -> tuple[Tensor, ...]:
            if not forward:
                return ()
            self._ahead[layer] = self._shared_kv(shard, layer)
            return self._ahead[layer].prefix()

        self.weights = SharedWeights(
            shard.exchange,
            layers,
            own=self.own_weights,
            rows=lambda layer: [*self._shapes(layer).values()],
            beside=prefix,
        )

    @contextmanager
    def sink(self, unit: Unit, layer: int) -> Iterator[GradientSink]:
        """Yield a sink that sums gradients of a layer at the owner, complete on exit."""
        shard = as_shard(unit)
        assert self.gradients is not None, "training needs gradient buffers"
        sums = gradients_of(self.gradients, layer) if shard.exchange.is_owner else nullcontext()
        with sums as totals:
            sink = SharedGradients(
                shard.exchange,
                totals=totals,
                shapes=self._shapes(layer).get(True, {}),
                dtype=self.own_weights.dtype,
                device=self.own_weights.device,
            )
            yield sink
            sink.finish()

    def kv(self, unit: Unit, layer: int, *, partial: bool) -> SharedKV:
        """Return keys and values of a layer: in forward those sent ahead, else fetched now."""
        assert not partial, "owners of shared units keep all keys and values"
        if layer in self._ahead:
            return self._ahead.pop(layer)
        kv = self._shared_kv(as_shard(unit), layer)
        kv.fetch()
        return kv

    def embed(self, unit: Unit) -> Tensor:
        """Return this shard of the first stage's input, computed and scattered by the owner."""
        shard = as_shard(unit)
        is_owner = shard.exchange.is_owner
        return self._scattered(shard, super().embed(shard.whole) if is_owner else None)

    def embed_backward(self, unit: Unit, dx_CE: Tensor) -> None:
        """Gather the gradient of the first stage's input; the owner adds embedding gradients."""
        shard = as_shard(unit)
        whole_CE = shard.exchange.gather(dx_CE, shard.sizes)
        if whole_CE is not None:
            super().embed_backward(shard.whole, whole_CE)

    def loss(self, unit: Unit, x_CE: Tensor, loss_scale: float | None) -> None:
        """Gather the last stage's output at the owner, which computes the losses."""
        shard = as_shard(unit)
        whole_CE = shard.exchange.gather(x_CE, shard.sizes)
        if whole_CE is not None:
            super().loss(shard.whole, whole_CE, loss_scale)

    def take_loss_gradient(self, unit: Unit) -> Tensor:
        """Return this shard of the gradient that the last stage's owner computed in forward."""
        shard = as_shard(unit)
        is_owner = shard.exchange.is_owner
        return self._scattered(shard, super().take_loss_gradient(shard.whole) if is_owner else None)

    def _scattered(self, shard: MspShard, whole_CE: Tensor | None) -> Tensor:
        """Return this shard's rows of the owner's tensor of the whole unit."""
        shape = (shard.tokens_C.shape[0], self.model.hidden_size)
        own = torch.empty(shape, dtype=self.own_weights.dtype, device=self.own_weights.device)
        parts = None if whole_CE is None else list(torch.split(whole_CE, list(shard.sizes)))
        return shard.exchange.scatter(parts, own)

    def _shapes(self, layer: int) -> dict[bool, dict[str, Shape]]:
        """Return the shapes of a layer's rows, by whether their parameters train.

        The rows are in the order of their first parameters.
        """
        trained = self.trainable.trained_names(self.model, layer)
        found: dict[bool, dict[str, Shape]] = {}
        for name, shape in self.trainable.layer_shapes(self.model, layer).items():
            found.setdefault(name in trained, {})[name] = shape
        return found

    def _shared_kv(self, shard: MspShard, layer: int) -> SharedKV:
        window = self.model.layer_type(layer).window
        return SharedKV(shard, layer=layer, window=window, store=self.kv_store)
