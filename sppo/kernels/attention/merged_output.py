"""Output of a span merged by log-sum-exp from outputs over parts of its keys, in fp32 or better.

``lse = log(exp(lse_1) + exp(lse_2))``, ``o = o_1 exp(lse_1 - lse) + o_2 exp(lse_2 - lse)``.

Legend: C queries, N query heads, K key/value heads, G = N/K, D head size, r rows of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sppo.kernels.fused import fused
from sppo.kernels.row_tiles import accumulation_tiles


class MergedOutput:
    """Running ``o`` and ``lse`` of a span, over the parts of its keys merged so far."""

    def __init__(self, q_NCD: Tensor, *, kv_heads: int) -> None:
        acc_dtype = torch.promote_types(q_NCD.dtype, torch.float32)
        heads, tokens, head_size = q_NCD.shape
        groups = (kv_heads, heads // kv_heads, tokens)
        self._o_KGCD = q_NCD.new_empty((*groups, head_size), dtype=acc_dtype)
        self._lse_KGC = q_NCD.new_empty(groups, dtype=acc_dtype)
        self._seen = [False] * q_NCD.shape[1]

    def add(self, rows: slice, o_KGrD: Tensor, lse_KGr: Tensor) -> None:
        """Merge the output of some rows over a part of their keys; the first output is copied."""
        seen = set(self._seen[rows])
        assert len(seen) == 1, f"{rows} were merged unevenly"
        so_far, lse = self._o_KGCD[:, :, rows], self._lse_KGC[:, :, rows]
        if not seen.pop():
            so_far.copy_(o_KGrD)
            lse.copy_(lse_KGr)
            self._seen[rows] = [True] * o_KGrD.shape[2]
            return
        if fused(so_far):
            from sppo.kernels.triton.merge import merge_

            merge_(*(x.flatten(0, 1) for x in (so_far, lse, o_KGrD, lse_KGr)))
            return
        both = torch.logaddexp(lse, lse_KGr)
        kept, added = ((part - both).exp_().unsqueeze(-1) for part in (lse, lse_KGr))
        for tile in accumulation_tiles(so_far):  # mixed dtypes make a cast copy: one tile at a time
            so_far[tile].mul_(kept[tile])
            so_far[tile].addcmul_(o_KGrD[tile].to(so_far.dtype), added[tile])
        lse.copy_(both)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (o_CND in ``dtype``, lse_NC) of all rows."""
        assert all(self._seen), "every query sees at least itself"
        return tokens_first(self._o_KGCD.flatten(0, 1), dtype), self._lse_KGC.flatten(0, 1)


def tokens_first(x_NCD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x_NCD`` as ``[C, N, D]`` in ``dtype``, transposed and cast in one pass."""
    heads, tokens, size = x_NCD.shape
    x_CND = torch.empty((tokens, heads, size), dtype=dtype, device=x_NCD.device)
    x_CND.transpose(0, 1).copy_(x_NCD)
    return x_CND
