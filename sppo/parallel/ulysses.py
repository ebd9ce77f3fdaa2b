"""Ulysses sequence parallelism: ranks shard heads inside attention, and tokens everywhere else.

Each of G ranks has some tokens of a subsequence with all heads. Before attention, an all-to-all
gives each rank all tokens of N/G heads; after attention, another all-to-all returns the output to
the shards of tokens (Jacobs et al., 2023). With fewer key/value heads than ranks, several ranks use
the same key/value head, and the gradients of its keys and values are summed on the rank that has
the tokens.

Legend: c tokens of this rank, C tokens of the whole subsequence, N query heads, K key/value heads,
D head size, G ranks, n = N/G query heads of this rank, k = max(1, K/G) key/value heads of this
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sppo.cost.sharding.heads import head_shard


def shard_tokens(tokens: int, *, degree: int) -> tuple[int, ...]:
    """Return the number of tokens on each of ``degree`` ranks, as equal as possible."""
    cuts = [tokens * rank // degree for rank in range(degree + 1)]
    return tuple(b - a for a, b in pairwise(cuts))


class UlyssesAllToAll:
    """All-to-all between shards of tokens and shards of heads.

    Methods take and return tensors for queries, of any number of heads, and for keys or values.
    Their argument ``shard_tokens`` is the number of tokens on each rank; its sum is C.

    Args:
        group: Ranks over which tokens are sharded.
        rank: Index of this rank in the group.
        num_heads: Number of query heads N.
        kv_heads: Number of key/value heads K.
    """

    def __init__(self, group: ProcessGroup, *, rank: int, num_heads: int, kv_heads: int) -> None:
        self._group, self.rank, self.degree = group, rank, group.size()
        self.shard = head_shard(num_heads, kv_heads, degree=self.degree)

    def to_heads(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor] = (),
        *,
        shard_tokens: Sequence[int],
    ) -> list[Tensor]:
        """Return queries ``[c, N, D]`` as ``[C, n, D]``, then keys ``[c, K, D]`` as ``[C, k, D]``.

        All go in one all-to-all.
        """
        sent = [*map(self._split, queries), *map(self._split_keys, keys)]
        heads = [tensor.shape[2] for tensor in sent]
        out_GchD = torch.cat(sent, dim=2).contiguous()
        tokens, row = out_GchD.shape[1], out_GchD.shape[2] * out_GchD.shape[3]
        received = out_GchD.new_empty((sum(shard_tokens), *out_GchD.shape[2:]))
        sizes = [count * row for count in shard_tokens], [tokens * row] * self.degree
        dist.all_to_all_single(received.view(-1), out_GchD.view(-1), *sizes, group=self._group)
        return [part.contiguous() for part in torch.split(received, heads, dim=1)]

    def to_tokens(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor] = (),
        *,
        shard_tokens: Sequence[int],
    ) -> list[Tensor]:
        """Return queries ``[C, n, D]`` as ``[c, N, D]``, then keys ``[C, k, D]`` as ``[c, K, D]``.

        Those of keys are gradients, summed over ranks that share a head. All go in one all-to-all.
        """
        sent = [*queries, *keys]
        out_ChD = torch.cat(sent, dim=1).contiguous()
        tokens, row = shard_tokens[self.rank], out_ChD.shape[1] * out_ChD.shape[2]
        received = out_ChD.new_empty((self.degree, tokens, *out_ChD.shape[1:]))
        sizes = [tokens * row] * self.degree, [count * row for count in shard_tokens]
        dist.all_to_all_single(received.view(-1), out_ChD.view(-1), *sizes, group=self._group)
        parts = torch.split(received, [tensor.shape[1] for tensor in sent], dim=2)
        joined = [_join(part) for part in parts[: len(queries)]]
        return joined + [self._join_keys(part) for part in parts[len(queries) :]]

    def add_up_(self, x: Tensor) -> None:
        """Replace ``x`` by its sum over the ranks."""
        dist.all_reduce(x, group=self._group)

    def lse_to_tokens(self, lse_nC: Tensor, shard_tokens: Sequence[int]) -> Tensor:
        """Return log-sum-exps ``[n, C]`` as ``[N, c]``."""
        (tokens,) = self.to_tokens([lse_nC.t().unsqueeze(2)], shard_tokens=shard_tokens)
        return tokens.squeeze(2).t().contiguous()

    def lse_to_heads(self, lse_Nc: Tensor, shard_tokens: Sequence[int]) -> Tensor:
        """Return log-sum-exps ``[N, c]`` as ``[n, C]``."""
        (heads,) = self.to_heads([lse_Nc.t().unsqueeze(2)], shard_tokens=shard_tokens)
        return heads.squeeze(2).t().contiguous()

    def _split(self, x_cND: Tensor) -> Tensor:
        """Return the query heads for each rank, ``[G, c, n, D]``."""
        tokens, heads, size = x_cND.shape
        return x_cND.reshape(tokens, self.degree, heads // self.degree, size).transpose(0, 1)

    def _split_keys(self, x_cKD: Tensor) -> Tensor:
        """Return the key/value heads for each rank, ``[G, c, k, D]``."""
        tokens, _, size = x_cKD.shape
        distinct = self.degree // self.shard.repeats
        heads = x_cKD.reshape(tokens, distinct, self.shard.keys, size).transpose(0, 1)
        return heads.repeat_interleave(self.shard.repeats, dim=0)

    def _join_keys(self, d_GckD: Tensor) -> Tensor:
        """Return the key/value gradients ``[c, K, D]``, summed over ranks that share a head."""
        if self.shard.repeats > 1:
            _, *shape = d_GckD.shape
            terms = d_GckD.reshape(-1, self.shard.repeats, *shape)
            exact = terms.float() if terms.dtype.itemsize < 4 else terms
            d_GckD = exact.sum(1).to(terms.dtype)
        return _join(d_GckD)


def _join(x_GchD: Tensor) -> Tensor:
    """Return the slices of all ranks side by side, ``[c, G * h, D]``."""
    return x_GchD.transpose(0, 1).flatten(1, 2)
