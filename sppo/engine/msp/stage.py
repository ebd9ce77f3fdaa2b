"""Pipeline stage on the ranks that run MSP shards of its units.

All ranks of an MSP group run the layers of :class:`sppo.engine.stage.Stage` at the same time: the
owner sends weights layer by layer, keys and values are gathered, and gradients return to the owner.
Saved tensors stay on the rank that ran the shard. Embedding and loss run on the owner, which
scatters the first stage's input and gathers the last stage's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.cost.parameters import layer_shapes
from sppo.engine.attention.kv_store import KVStore
from sppo.engine.msp.shard import MspShard
from sppo.engine.msp.shared_kv import SharedKV
from sppo.engine.msp.weights import MspGradients, MspWeights
from sppo.engine.providers.gradients import GradientProvider, gradients_of
from sppo.engine.stage import Stage
from sppo.engine.unit import Unit
from sppo.kernels.attention.interface import Backend
from sppo.model.gradients import GradientSink
from sppo.offload.block_store import BlockStore
from sppo.offload.held_bytes import HeldBytes
from sppo.parallel.msp_exchange import TokenMembers
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass(frozen=True, slots=True)
class MspMemory:
    """Peak memory that a rank held of one stage of another rank."""

    layers: int
    """Number of layers whose weights were held at once."""
    prefix_bytes: int
    """Bytes of keys and values and their gradients."""


class MspStage(Stage):
    """Stage that runs MSP shards: every unit passed to its methods must be an `MspShard`.

    Args:
        model: Model configuration.
        layers: Layers of the stage.
        owner: Stage that runs whole units, on the rank that owns it; None on borrowers.
        gradients: Provider of the owner's fp32 sums; None in evaluation.
        store: Store of saved tensors, shared by all stages of the rank.
        kv: Store of keys and values, shared by all stages of the rank.
        heads: Ulysses all-to-all among the ranks over which tokens are sharded; None if they are
            not.
        members: The same ranks; each sends and receives its part of the rows of the weights.
        dtype: Type of weights and activations.
        device: Device of this rank.
        attention_backend: See :func:`sppo.kernels.attention.interface.attention_forward`.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        layers: range,
        owner: Stage | None,
        gradients: GradientProvider | None,
        store: BlockStore,
        kv: KVStore,
        heads: UlyssesAllToAll | None,
        members: TokenMembers,
        dtype: torch.dtype,
        device: torch.device,
        attention_backend: Backend = "auto",
    ) -> None:
        own = None if owner is None else owner.weights
        self._msp_weights = MspWeights(model, own=own, members=members, dtype=dtype, device=device)
        super().__init__(
            model,
            weights=self._msp_weights,
            gradients=gradients,
            store=store,
            kv=kv,
            layers=layers,
            exchange=heads,
            attention_backend=attention_backend,
        )
        self._owner, self._members = owner, members
        self._shapes, self._borrowed = layer_shapes(model), HeldBytes()
        self._ahead: dict[int, SharedKV] = {}

    @property
    def most_held(self) -> MspMemory:
        """Peak memory held for the stage of another rank since the process started."""
        return MspMemory(self._msp_weights.most_layers, self._borrowed.peak)

    def forward(
        self, unit: Unit, x_CE: Tensor | None, *, loss_scale: float | None
    ) -> Tensor | None:
        """Run one shard forward, at the same time as the other shards of its unit.

        See :meth:`sppo.engine.stage.Stage.forward`.
        """
        shard = _shard(unit)

        def prefix(index: int) -> tuple[Tensor, ...]:
            self._ahead[index] = self._shared_kv(shard, index)
            return self._ahead[index].prefix()

        self._msp_weights.connect(shard.exchange, also=prefix)
        self._msp_weights.begin(self._layers)
        return super().forward(unit, x_CE, loss_scale=loss_scale)

    def backward(
        self,
        unit: Unit,
        dy_CE: Tensor | None,
        *,
        defer_weights: bool = False,
        restore_kv: Callable[[], None] | None = None,
    ) -> Tensor | None:
        """Run one shard backward, at the same time as the other shards of its unit.

        See :meth:`sppo.engine.stage.Stage.backward`. `defer_weights` and `restore_kv` are ignored:
        weight gradients are never deferred, and K and V never leave the device.
        """
        self._msp_weights.connect(_shard(unit).exchange)
        self._msp_weights.begin(reversed(self._layers))
        return super().backward(unit, dy_CE)

    def embed(self, unit: Unit) -> Tensor:
        """Return this shard of the first stage's input, computed and scattered by the owner."""
        whole = None if self._owner is None else self._owner.embed(_shard(unit).whole)
        return self._handed_out(unit, whole)

    def embed_backward(self, unit: Unit, dx_CE: Tensor) -> None:
        """Gather the gradient of the first stage's input; the owner adds embedding gradients."""
        shard = _shard(unit)
        whole_CE = shard.exchange.gather(dx_CE, shard.sizes)
        if whole_CE is not None:
            assert self._owner is not None, "the owner of the first stage has the embedding"
            self._owner.embed_backward(shard.whole, whole_CE)

    def loss(self, unit: Unit, x_CE: Tensor, loss_scale: float | None) -> None:
        """Gather the last stage's output at the owner, which computes the losses."""
        shard = _shard(unit)
        whole_CE = shard.exchange.gather(x_CE, shard.sizes)
        if whole_CE is not None:
            assert self._owner is not None, "the owner of the last stage has the head"
            self._owner.loss(shard.whole, whole_CE, loss_scale)

    def take_loss_gradient(self, unit: Unit) -> Tensor:
        """Return this shard of the gradient that the last stage's owner computed in forward."""
        whole = None if self._owner is None else self._owner.take_loss_gradient(_shard(unit).whole)
        return self._handed_out(unit, whole)

    def _handed_out(self, unit: Unit, whole_CE: Tensor | None) -> Tensor:
        """Return this shard's rows of a tensor of the whole unit, scattered by the owner."""
        shard, weights = _shard(unit), self._weights
        shape = (shard.tokens_C.shape[0], self.model.hidden_size)
        own = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        parts = None if whole_CE is None else list(torch.split(whole_CE, list(shard.sizes)))
        return shard.exchange.scatter(parts, own)

    def _unit_kv(self, unit: Unit, index: int, *, saves_kv: bool) -> SharedKV:
        if index in self._ahead:  # in forward
            return self._ahead.pop(index)
        kv = self._shared_kv(_shard(unit), index)
        kv.fetch()
        return kv

    def _shared_kv(self, shard: MspShard, index: int) -> SharedKV:
        return SharedKV(
            shard,
            layer=index,
            window=self.model.window_of(index),
            store=self.kv,
            borrowed=self._borrowed,
        )

    @contextmanager
    def _sink(self, unit: Unit, index: int, *, deferred: bool) -> Iterator[GradientSink]:
        """Yield a sink that sums gradients of layer ``index`` at the owner, complete on exit."""
        with self._sums(index) as totals:
            sink = MspGradients(
                _shard(unit).exchange,
                totals=totals,
                members=self._members,
                shapes=self._shapes,
                dtype=self._weights.dtype,
                device=self._weights.device,
            )
            yield sink
            sink.finish()

    def _sums(self, index: int) -> AbstractContextManager[Mapping[str, Tensor] | None]:
        """Take the sums of layer ``index`` on the owner; None on a borrower."""
        if self._owner is None:
            return nullcontext()
        return gradients_of(self._provided_gradients, index)


def _shard(unit: Unit) -> MspShard:
    assert isinstance(unit, MspShard), "an MSP stage runs shards"
    return unit
