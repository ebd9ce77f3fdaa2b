"""Providers of a stage on the ranks that run MSP shards of its units.

All ranks of an MSP group run the layers of a stage at the same time: the owner sends weights layer
by layer, keys and values are gathered, and gradients return to the owner. Saved tensors stay on the
rank that ran the shard. Embedding and loss run on the owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.cost.parameters import layer_shapes
from sppo.engine.msp.ends import SharedEnds
from sppo.engine.msp.gradients import SharedGradients
from sppo.engine.msp.shard import MspShard, as_shard
from sppo.engine.msp.shared_kv import SharedKV
from sppo.engine.msp.weights import SharedWeights
from sppo.engine.providers.gradients import gradients_of
from sppo.engine.providers.weights import WeightProvider
from sppo.engine.stage_providers import StageProviders
from sppo.engine.unit import Unit
from sppo.model.gradients import GradientSink
from sppo.offload.held_bytes import HeldBytes


@dataclass(frozen=True, slots=True)
class BorrowedMemory:
    """Peak memory that a rank held of one stage of another rank."""

    weights_bytes: int
    kv_bytes: int
    """Bytes of keys and values and their gradients."""


class ShardProviders(StageProviders):
    """Providers of the shards of one stage.

    Their weights are those of the pass that :meth:`begin` began.

    Args:
        model: Model configuration.
        weights: Provider of the rank's own stages; the owner sends from it.
        whole: Providers of the whole units of the rank.
    """

    def __init__(
        self, model: ModelConfig, *, weights: WeightProvider, whole: StageProviders
    ) -> None:
        ends = SharedEnds(whole.ends, model.hidden_size, weights.dtype, weights.device)
        super().__init__(weights, whole.gradients, whole.store, ends)
        self._model, self._shapes, self._own_weights = model, layer_shapes(model), weights
        self._ahead: dict[int, SharedKV] = {}
        self._borrowed_weights, self._borrowed_kv = HeldBytes(), HeldBytes()

    @property
    def most_held(self) -> BorrowedMemory:
        """Peak memory held for the stage of another rank."""
        return BorrowedMemory(self._borrowed_weights.peak, self._borrowed_kv.peak)

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
            own=self._own_weights,
            shapes=self._shapes,
            beside=prefix,
            borrowed=self._borrowed_weights,
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
                shapes=self._shapes,
                dtype=self._own_weights.dtype,
                device=self._own_weights.device,
            )
            yield sink
            sink.finish()

    def kv(self, unit: Unit, layer: int) -> SharedKV:
        """Return keys and values of a layer: in forward those sent ahead, else fetched now."""
        if layer in self._ahead:
            return self._ahead.pop(layer)
        kv = self._shared_kv(as_shard(unit), layer)
        kv.fetch()
        return kv

    def _shared_kv(self, shard: MspShard, layer: int) -> SharedKV:
        return SharedKV(
            shard,
            layer=layer,
            window=self._model.window_of(layer),
            store=self.store,
            borrowed=self._borrowed_kv,
        )
