"""Megatron's sequence parallelism: tokens are sharded between products, and weights in them.

Each of G ranks has some tokens of the residual stream, and with them does the embedding, norms,
residual additions, head and loss. Before the projections of a layer all tokens are gathered; each
rank has some rows of the weights, so some heads and some of the MLP's width, of all tokens. The
products that lead back into the residual stream have the matching columns, so each rank gets a
part of every sum: they are added up where their tokens are (Korthikanti et al., 2022, section 4.2).
With fewer key/value heads than ranks, several ranks hold the weights of the same one.

Legend: c tokens here, C of the whole subsequence, E hidden, G ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, layer_shapes, outer_shapes, stage_shapes
from sppo.cost.sharding.heads import tensor_shard
from sppo.cost.sharding.megatron_weights import COLUMNS, KEYS, ROWS
from sppo.parallel.collectives import all_gather
from sppo.parallel.job.peer_errors import peer_errors
from sppo.parallel.mesh import Holders


@dataclass(frozen=True, slots=True)
class WeightSharding:
    """The part of every parameter that one rank of a group holds.

    Attributes:
        model: the whole shape.
        rank: place in the group.
        degree: ranks over which weights are sharded; 1: each holds them whole, as with Ulysses.
    """

    model: ModelConfig
    rank: int = 0
    degree: int = 1

    @property
    def own_model(self) -> ModelConfig:
        """The shape of what this rank computes between gathering tokens and adding up."""
        if self.degree == 1:
            return self.model
        shard = tensor_shard(self.model, degree=self.degree)
        own = {
            "num_heads": shard.queries,
            "num_kv_heads": shard.keys,
            "head_size": self.model.head_dim,
            "mlp_size": self.model.mlp_size // self.degree,
        }
        return self.model.model_copy(update=own)

    def shapes(self, layers: range) -> dict[str, Shape]:
        """Return the shapes of this rank's part of a stage's parameters, by global name."""
        shapes = stage_shapes(self.own_model, layers)
        return {name: shape for name, shape in shapes.items() if self._is_held(name)}

    def holders(self, name: str) -> Holders:
        """Return which ranks hold the same part of a parameter as this one."""
        part = _part(name)
        if self.degree == 1 or part not in (*ROWS, *COLUMNS):
            return "stage"
        repeats = tensor_shard(self.model, degree=self.degree).repeats
        return "keys" if part in KEYS and repeats > 1 else "block"

    def offsets(self, name: str) -> tuple[int, ...]:
        """Return where this rank's part begins in the whole parameter."""
        whole = _shape_of(name, self.model)
        part, is_bias = _part(name), name.endswith(".bias")
        if self.degree == 1 or part not in (*ROWS, *COLUMNS) or (is_bias and part in COLUMNS):
            return (0,) * len(whole)
        shard = tensor_shard(self.model, degree=self.degree)
        copies = shard.repeats if part in KEYS else 1
        dimension = 1 if part in COLUMNS else 0
        first = whole[dimension] * copies // self.degree * (self.rank // copies)
        return tuple(first if index == dimension else 0 for index in range(len(whole)))

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter; memory of its own, where it is not all."""
        shape = _shape_of(name, self.own_model)
        if shape == tuple(whole.shape):
            return whole
        for dimension, (start, size) in enumerate(zip(self.offsets(name), shape, strict=True)):
            whole = whole.narrow(dimension, start, size)
        return whole.clone(memory_format=torch.contiguous_format)

    def _is_held(self, name: str) -> bool:
        """The bias of a sum over ranks is added once: by the first."""
        return self.rank == 0 or not (_part(name) in COLUMNS and name.endswith(".bias"))


class MegatronSequenceParallel:
    """Gathers the tokens of a group, and adds up what its ranks have of every token.

    Args:
        group: of the ranks over which tokens and weights are sharded.
        rank: this one's place in it.
        model: the whole shape.
    """

    def __init__(self, group: ProcessGroup, *, rank: int, model: ModelConfig) -> None:
        self._group, self.rank, self.degree = group, rank, group.size()
        self.sharding = WeightSharding(model, rank, self.degree)

    def gather(self, x_cE: Tensor, parts: Sequence[int]) -> Tensor:
        """Return ``[C, E]``: the tokens of all ranks, in order.

        Args:
            x_cE: this rank's.
            parts: tokens that each rank has; they add up to C.
        """
        most = max(parts)
        sent = x_cE.contiguous()
        if x_cE.shape[0] < most:
            sent = torch.cat([sent, sent.new_zeros((most - sent.shape[0], sent.shape[1]))])
        received = sent.new_empty((self.degree * most, sent.shape[1]))
        with peer_errors("gathering tokens"):
            all_gather(received, sent, group=self._group)
        if min(parts) == most:
            return received
        slices = received.view(self.degree, most, -1)
        return torch.cat([x[:part] for x, part in zip(slices, parts, strict=True)])

    def scatter_sum(self, x_CE: Tensor, parts: Sequence[int]) -> Tensor:
        """Return ``[c, E]``: the sum over all ranks, of this rank's tokens.

        What travels has the dtype of ``x_CE``; a sum in half precision is taken in fp32 and
        rounded once.

        Args:
            x_CE: this rank's summand for all tokens.
            parts: tokens that each rank has; they add up to C.
        """
        sent = x_CE.contiguous()
        own, width = parts[self.rank], sent.shape[1]
        received = sent.new_empty((self.degree, own, width))
        with peer_errors("adding up tokens"):
            dist.all_to_all_single(
                received.view(-1),
                sent.view(-1),
                [own * width] * self.degree,
                [part * width for part in parts],
                group=self._group,
            )
        return received.sum(0)


@dataclass(frozen=True, slots=True)
class ShardedTokens:
    """:class:`sppo.model.layer.TokenExchange` for the tokens of one subsequence."""

    exchange: MegatronSequenceParallel
    parts: tuple[int, ...]

    def gather(self, x_cE: Tensor) -> Tensor:
        """Return ``[C, E]``, the tokens of all ranks (:meth:`MegatronSequenceParallel.gather`)."""
        return self.exchange.gather(x_cE, self.parts)

    def scatter_sum(self, x_CE: Tensor) -> Tensor:
        """Return ``[c, E]``, own tokens of the sum over all ranks."""
        return self.exchange.scatter_sum(x_CE, self.parts)


def _shape_of(name: str, model: ModelConfig) -> Shape:
    if name.startswith("layers."):
        return layer_shapes(model)[name.split(".", 2)[2]]
    return outer_shapes(model)[name]


def _part(name: str) -> str:
    """Return the name of a parameter's module within its layer: ``q`` of ``layers.3.q.weight``."""
    return name.split(".")[-2] if name.startswith("layers.") else ""
