"""Megatron sequence parallelism: tokens are sharded outside of projections, weights inside.

Each of G ranks holds some tokens of the residual stream, and computes the embedding, norms,
residual additions, head and loss of its tokens. Before the projections of a layer, all tokens are
gathered. Each rank holds some rows of the projections' weights, and so computes some heads and a
part of the MLP's width for all tokens. The projections back into the residual stream are sharded by
columns, so each rank gets a partial sum for all tokens, and a reduce-scatter adds up the partial
sums of each token on its rank (Korthikanti et al., 2022, section 4.2). With fewer key/value heads
than ranks, several ranks hold the weights of the same head.

Legend: c tokens of this rank, C tokens of the whole subsequence, E hidden, G ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.config.model import ModelConfig
from sppo.cost.parameters import COLUMNS, KEYS, ROWS, Shape, outer_shapes
from sppo.cost.sharding.heads import tensor_shard
from sppo.cost.trainable import EVERYTHING, Trainable, is_whole_factor
from sppo.parallel.collectives import all_gather
from sppo.parallel.mesh import ReplicaGroup


@dataclass(frozen=True, slots=True)
class WeightSharding:
    """Shards of all parameters that one rank of a sequence-parallel group holds.

    Attributes:
        model: Configuration of the whole model.
        rank: Index of the rank in its group.
        degree: Number of ranks over which weights are sharded; 1 if every rank holds whole
            weights, as with Ulysses.
        trainable: Factors of adapters beside the weights. A factor is sharded along the dimension
            that it has from its weight; the other of the two factors is whole.
    """

    model: ModelConfig
    rank: int = 0
    degree: int = 1
    trainable: Trainable = EVERYTHING

    @property
    def own_model(self) -> ModelConfig:
        """Configuration of the part of a layer that this rank computes on gathered tokens."""
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
        """Return the shapes of this rank's shards of a stage's parameters, by global name."""
        shapes = self.trainable.stage_shapes(self.own_model, layers)
        return {name: shape for name, shape in shapes.items() if self._is_held(name)}

    def replica_group(self, name: str) -> ReplicaGroup:
        """Return the kind of group whose ranks hold the same shard of a parameter as this rank."""
        if self.degree == 1 or (_sharded_dimension(name) is None and not _is_added_once(name)):
            return "stage"
        repeats = tensor_shard(self.model, degree=self.degree).repeats
        return "keys" if _part(name) in KEYS and repeats > 1 else "block"

    def offsets(self, name: str) -> tuple[int, ...]:
        """Return the offsets of this rank's shard in the whole parameter, one per dimension."""
        whole, dimension = self._shape(name, self.model), _sharded_dimension(name)
        if self.degree == 1 or dimension is None:
            return (0,) * len(whole)
        shard = tensor_shard(self.model, degree=self.degree)
        copies = shard.repeats if _part(name) in KEYS else 1
        first = whole[dimension] * copies // self.degree * (self.rank // copies)
        return tuple(first if index == dimension else 0 for index in range(len(whole)))

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard of a parameter: a copy, or ``whole`` if it is not sharded."""
        shape = self._shape(name, self.own_model)
        if shape == tuple(whole.shape):
            return whole
        for dimension, (start, size) in enumerate(zip(self.offsets(name), shape, strict=True)):
            whole = whole.narrow(dimension, start, size)
        return whole.clone(memory_format=torch.contiguous_format)

    def _is_held(self, name: str) -> bool:
        return self.rank == 0 or not _is_added_once(name)

    def _shape(self, name: str, model: ModelConfig) -> Shape:
        if not name.startswith("layers."):
            return outer_shapes(model)[name]
        _, index, local = name.split(".", 2)
        return self.trainable.layer_shapes(model, int(index))[local]


class MegatronSequenceParallel:
    """Communication of Megatron sequence parallelism: gathers tokens, and reduce-scatters sums.

    Args:
        group: Ranks over which tokens and weights are sharded.
        rank: Index of this rank in the group.
        model: Configuration of the whole model.
    """

    def __init__(self, group: ProcessGroup, *, rank: int, model: ModelConfig) -> None:
        self._group, self.rank, self.degree = group, rank, group.size()
        self.sharding = WeightSharding(model, rank, self.degree)

    def gather(self, x_cE: Tensor, shard_tokens: Sequence[int]) -> Tensor:
        """Return the tokens of all ranks, in order, ``[C, E]``.

        Args:
            x_cE: Tokens of this rank.
            shard_tokens: Number of tokens on each rank; the sum is C.
        """
        most = max(shard_tokens)
        sent = x_cE.contiguous()
        if x_cE.shape[0] < most:
            sent = torch.cat([sent, sent.new_zeros((most - sent.shape[0], sent.shape[1]))])
        received = sent.new_empty((self.degree * most, sent.shape[1]))
        all_gather(received, sent, group=self._group)
        if min(shard_tokens) == most:
            return received
        slices = received.view(self.degree, most, -1)
        return torch.cat([x[:tokens] for x, tokens in zip(slices, shard_tokens, strict=True)])

    def scatter_sum(self, x_CE: Tensor, shard_tokens: Sequence[int]) -> Tensor:
        """Return the sum over all ranks for the tokens of this rank, ``[c, E]``.

        Messages have the dtype of ``x_CE``; sums of half precision are accumulated in fp32 and
        rounded once.

        Args:
            x_CE: Summand of this rank for all tokens.
            shard_tokens: Number of tokens on each rank; the sum is C.
        """
        sent = x_CE.contiguous()
        own, width = shard_tokens[self.rank], sent.shape[1]
        received = sent.new_empty((self.degree, own, width))
        dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            [own * width] * self.degree,
            [tokens * width for tokens in shard_tokens],
            group=self._group,
        )
        return received.sum(0)


def _sharded_dimension(name: str) -> int | None:
    """Return the dimension along which a parameter is sharded; None if ranks hold it whole."""
    if is_whole_factor(name) or _is_added_once(name):
        return None
    part = _part(name)
    return 0 if part in ROWS else 1 if part in COLUMNS else None


def _is_added_once(name: str) -> bool:
    """Return whether a parameter is the bias of a sum over the ranks, which rank 0 alone adds."""
    return _part(name) in COLUMNS and name.endswith(".bias")


def _part(name: str) -> str:
    """Return the module of a layer's parameter, ``q`` of ``layers.3.q.weight``, else ``""``."""
    return name.split(".")[-2] if name.startswith("layers.") else ""
