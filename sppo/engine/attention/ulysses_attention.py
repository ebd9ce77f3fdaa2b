"""Attention of one (layer, sequence, span) whose tokens are sharded over ranks (Ulysses).

Legend: c tokens of this rank, C tokens of the subsequence, N query heads, n query heads of this
rank, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from sppo.engine.attention.subsequence_attention import KVCacheAttention
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass(frozen=True, slots=True)
class UlyssesAttention:
    """:class:`sppo.model.layer.SubsequenceAttention` for this rank's tokens.

    Attributes:
        stored: Attention of all tokens of the subsequence with this rank's heads.
        exchange: All-to-all among the sequence-parallel ranks.
        shard_tokens: Number of tokens on each rank.
        unsaved_attention_tokens: Number of last tokens on each rank whose attention output is
            not saved.
    """

    stored: KVCacheAttention
    exchange: UlyssesAllToAll
    shard_tokens: tuple[int, ...]
    unsaved_attention_tokens: tuple[int, ...]

    def forward(self, q_cND: Tensor, k_cKD: Tensor, v_cKD: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange tokens for heads, store k and v, attend, exchange back.

        Returns:
            (o_cND, lse_Nc) of this rank's tokens.
        """
        o, lse = self.stored.forward(
            *self.exchange.inputs_to_heads(q_cND, k_cKD, v_cKD, self.shard_tokens)
        )
        return self._to_tokens(o, lse, self.shard_tokens)

    def recompute(self, q_cND: Tensor) -> tuple[Tensor, Tensor]:
        """Recompute attention for this rank's tokens whose output was not saved.

        If each rank lacks only some of its tokens, the missing tokens of the subsequence are not
        contiguous, so each rank's missing tokens are a span of their own.

        Returns:
            (o_cND, lse_Nc) of the missing tokens of this rank.
        """
        assert q_cND.shape[0] == self.unsaved_attention_tokens[self.exchange.rank], (
            "the tokens that are missing"
        )
        (q,) = self.exchange.queries_to_heads([q_cND], self.unsaved_attention_tokens)
        outputs, start = [], self.stored.span.start
        if self.unsaved_attention_tokens == self.shard_tokens:
            outputs.append(self.stored.recompute(q))
        else:
            for part_CnD, end in zip(
                torch.split(q, list(self.unsaved_attention_tokens)),
                accumulate(self.shard_tokens),
                strict=True,
            ):
                span = replace(self.stored.span, end=start + end)
                outputs.append(replace(self.stored, span=span).recompute(part_CnD))
        o = torch.cat([o for o, _ in outputs])
        lse = torch.cat([lse for _, lse in outputs], dim=1)
        return self._to_tokens(o, lse, self.unsaved_attention_tokens)

    def backward(
        self, do_cND: Tensor, q_cND: Tensor, o_cND: Tensor, lse_Nc: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_cND, dk_cKD, dv_cKD) of this rank's tokens; exchanges tokens for heads."""
        do, q, o = self.exchange.queries_to_heads([do_cND, q_cND, o_cND], self.shard_tokens)
        lse = self.exchange.lse_to_heads(lse_Nc, self.shard_tokens)
        gradients = self.stored.backward(do, q, o, lse)
        return self.exchange.gradients_to_tokens(*gradients, self.shard_tokens)

    def _to_tokens(
        self, o_CnD: Tensor, lse_nC: Tensor, shard_tokens: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        return (
            self.exchange.queries_to_tokens(o_CnD, shard_tokens),
            self.exchange.lse_to_tokens(lse_nC, shard_tokens),
        )
