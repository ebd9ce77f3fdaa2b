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

    The argument ``shard_tokens`` of the methods is the number of tokens on each rank; its sum is C.

    Args:
        group: Ranks over which tokens are sharded.
        rank: Index of this rank in the group.
        num_heads: Number of query heads N.
        kv_heads: Number of key/value heads K.
    """

    def __init__(self, group: ProcessGroup, *, rank: int, num_heads: int, kv_heads: int) -> None:
        self._group, self.rank, self.degree = group, rank, group.size()
        self.shard = head_shard(num_heads, kv_heads, degree=self.degree)

    def queries_to_heads(
        self, tensors: Sequence[Tensor], shard_tokens: Sequence[int]
    ) -> list[Tensor]:
        """Return each tensor ``[c, N, D]`` as ``[C, n, D]``, in one all-to-all."""
        return self._to_heads([self._split(tensor) for tensor in tensors], shard_tokens)

    def inputs_to_heads(
        self, q_cND: Tensor, k_cKD: Tensor, v_cKD: Tensor, shard_tokens: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (q_CnD, k_CkD, v_CkD), in one all-to-all."""
        sent = [self._split(q_cND), self._split_keys(k_cKD), self._split_keys(v_cKD)]
        q, k, v = self._to_heads(sent, shard_tokens)
        return q, k, v

    def keys_to_heads(
        self, k_cKD: Tensor, v_cKD: Tensor, shard_tokens: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return (k_CkD, v_CkD), in one all-to-all."""
        k, v = self._to_heads([self._split_keys(k_cKD), self._split_keys(v_cKD)], shard_tokens)
        return k, v

    def queries_to_tokens(self, o_CnD: Tensor, shard_tokens: Sequence[int]) -> Tensor:
        """Return an attention output ``[C, n, D]`` as ``[c, N, D]``."""
        (o,) = self._to_tokens([o_CnD], shard_tokens)
        return _join(o)

    def gradients_to_tokens(
        self, dq_CnD: Tensor, dk_CkD: Tensor, dv_CkD: Tensor, shard_tokens: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_cND, dk_cKD, dv_cKD); dk and dv are summed over ranks that share a head."""
        dq, dk, dv = self._to_tokens([dq_CnD, dk_CkD, dv_CkD], shard_tokens)
        return _join(dq), self._join_keys(dk), self._join_keys(dv)

    def lse_to_tokens(self, lse_nC: Tensor, shard_tokens: Sequence[int]) -> Tensor:
        """Return log-sum-exps ``[n, C]`` as ``[N, c]``."""
        tokens = self.queries_to_tokens(lse_nC.t().unsqueeze(2), shard_tokens)
        return tokens.squeeze(2).t().contiguous()

    def lse_to_heads(self, lse_Nc: Tensor, shard_tokens: Sequence[int]) -> Tensor:
        """Return log-sum-exps ``[N, c]`` as ``[n, C]``."""
        (heads,) = self.queries_to_heads([lse_Nc.t().unsqueeze(2)], shard_tokens)
        return heads.squeeze(2).t().contiguous()

    def _split(self, x_cND: Tensor) -> Tensor:
        """Return the query heads for each rank, ``[G, c, n, D]``."""
        tokens, _, size = x_cND.shape
        return x_cND.reshape(tokens, self.degree, self.shard.queries, size).transpose(0, 1)

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
            d_GckD = (
                terms.float().sum(1).to(terms.dtype) if terms.dtype.itemsize < 4 else (terms.sum(1))
            )
        return _join(d_GckD)

    def _to_heads(self, sent: Sequence[Tensor], shard_tokens: Sequence[int]) -> list[Tensor]:
        """Return each tensor ``[G, c, h, D]``, one slice for each rank, as ``[C, h, D]``."""
        heads = [tensor.shape[2] for tensor in sent]
        out_GchD = torch.cat(list(sent), dim=2).contiguous()
        tokens, row = out_GchD.shape[1], out_GchD.shape[2] * out_GchD.shape[3]
        received = out_GchD.new_empty((sum(shard_tokens), *out_GchD.shape[2:]))
        self._exchange(
            received,
            out_GchD,
            [count * row for count in shard_tokens],
            [tokens * row] * self.degree,
        )
        return [part.contiguous() for part in torch.split(received, heads, dim=1)]

    def _to_tokens(self, sent: Sequence[Tensor], shard_tokens: Sequence[int]) -> list[Tensor]:
        """Return each tensor ``[C, h, D]`` as ``[G, c, h, D]``, one slice from each rank."""
        heads = [tensor.shape[1] for tensor in sent]
        out_ChD = torch.cat(list(sent), dim=1).contiguous()
        tokens, row = shard_tokens[self.rank], out_ChD.shape[1] * out_ChD.shape[2]
        received = out_ChD.new_empty((self.degree, tokens, *out_ChD.shape[1:]))
        self._exchange(
            received, out_ChD, [tokens * row] * self.degree, [count * row for count in shard_tokens]
        )
        return list(torch.split(received, heads, dim=2))

    def _exchange(
        self, received: Tensor, sent: Tensor, in_sizes: list[int], out_sizes: list[int]
    ) -> None:
        dist.all_to_all_single(
            received.view(-1), sent.view(-1), in_sizes, out_sizes, group=self._group
        )


def _join(x_GchD: Tensor) -> Tensor:
    """Return the slices of all ranks side by side, ``[c, G * h, D]``."""
    return x_GchD.transpose(0, 1).flatten(1, 2)
