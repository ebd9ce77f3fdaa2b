"""Attention of one (layer, sequence, span) whose tokens several ranks share (Ulysses).

Legend: c tokens here, C of the subsequence, N query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from sppo.engine.subsequence_attention import KVCacheAttention
from sppo.parallel.ulysses import UlyssesAllToAll


@dataclass(frozen=True, slots=True)
class UlyssesAttention:
    """:class:`sppo.model.layer.SubsequenceAttention` for this rank's tokens.

    Attributes:
        stored: attention of all tokens of the subsequence with this rank's heads.
        exchange: with the ranks that have the other tokens.
        parts: tokens that each of them has.
        missing: of those, the last ones whose attention output is not saved.
    """

    stored: KVCacheAttention
    exchange: UlyssesAllToAll
    parts: tuple[int, ...]
    missing: tuple[int, ...]

    def forward(self, q_cND: Tensor, k_cKD: Tensor, v_cKD: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange tokens for heads, store k and v, attend, and exchange back; (o_cND, lse_Nc)."""
        o, lse = self.stored.forward(
            *self.exchange.inputs_to_heads(q_cND, k_cKD, v_cKD, self.parts)
        )
        return self._to_tokens(o, lse, self.parts)

    def recompute(self, q_cND: Tensor) -> tuple[Tensor, Tensor]:
        """Recompute attention for the tokens whose output was not saved; (o_cND, lse_Nc).

        Where each rank lacks its last tokens only, those of one rank are not next to another's.
        """
        assert q_cND.shape[0] == self.missing[self.exchange.rank], "the tokens that are missing"
        (q,) = self.exchange.queries_to_heads([q_cND], self.missing)
        outputs, start = [], self.stored.span.start
        if self.missing == self.parts:
            outputs.append(self.stored.recompute(q))
        else:
            for part_CnD, end in zip(
                torch.split(q, list(self.missing)), accumulate(self.parts), strict=True
            ):
                span = replace(self.stored.span, end=start + end)
                outputs.append(replace(self.stored, span=span).recompute(part_CnD))
        o = torch.cat([o for o, _ in outputs])
        lse = torch.cat([lse for _, lse in outputs], dim=1)
        return self._to_tokens(o, lse, self.missing)

    def backward(
        self, do_cND: Tensor, q_cND: Tensor, o_cND: Tensor, lse_Nc: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange do and o for heads and return (dq_cND, dk_cKD, dv_cKD) of this rank's tokens."""
        do, q, o = self.exchange.queries_to_heads([do_cND, q_cND, o_cND], self.parts)
        lse = self.exchange.lse_to_heads(lse_Nc, self.parts)
        gradients = self.stored.backward(do, q, o, lse)
        return self.exchange.gradients_to_tokens(*gradients, self.parts)

    def _to_tokens(
        self, o_CnD: Tensor, lse_nC: Tensor, parts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        return (
            self.exchange.queries_to_tokens(o_CnD, parts),
            self.exchange.lse_to_tokens(lse_nC, parts),
        )
