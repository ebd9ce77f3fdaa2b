"""Attention blocks in plain torch operations, for cases that no faster kernel supports.

The kernel runs on every device and in every dtype. Scores exist for one tile of rows at a time, so
memory grows with the keys of a block and not with its rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sppo.units import MIB

TILE_BYTES = 64 * MIB
"""Most bytes of one tile of scores."""


class TorchBlocks:
    """Block kernel of matrix products, computed in fp32 or better."""

    def backward_token_multiple(self, dtype: torch.dtype) -> int | None:
        """Return None: backward supports any number of tokens."""
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of one block by plain torch operations, tile by tile."""
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        k, v = k.to(acc_dtype), v.to(acc_dtype)
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=acc_dtype, device=q.device)
        for rows in _tiles(q, k):
            scores = _scores(q, k, rows, causal=causal, mask=mask, scale=scale)
            lse[:, :, rows] = scores.logsumexp(-1)
            weights = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            o[:, :, rows] = (weights @ v).to(o.dtype)
            del scores, weights  # before the next tile is made
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of one block in fp32 or better, tile by tile."""
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        k, v = k.to(acc_dtype), v.to(acc_dtype)
        dq = torch.empty(q.shape, dtype=acc_dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=acc_dtype, device=q.device) for x in (k, v))
        for rows in _tiles(q, k):
            do_rows, q_rows = do[:, :, rows].to(acc_dtype), q[:, :, rows].to(acc_dtype)
            scores = _scores(q, k, rows, causal=causal, mask=mask, scale=scale)
            weights = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            dv += weights.transpose(-1, -2) @ do_rows
            delta = (do_rows * o[:, :, rows]).sum(-1, keepdim=True)
            dscores = (do_rows @ v.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(scale)
            dq[:, :, rows] = dscores @ k
            dk += dscores.transpose(-1, -2) @ q_rows
            del scores, weights, dscores  # before the next tile is made
        return dq, dk, dv


def _tiles(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yield slices of rows whose scores have at most TILE_BYTES, at least one row each."""
    batch, heads, rows, _ = q.shape
    step = max(1, TILE_BYTES // (batch * heads * k.shape[2] * k.element_size()))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _scores(
    q: Tensor, k: Tensor, rows: slice, *, causal: bool, mask: Tensor | None, scale: float
) -> Tensor:
    """Return the scores ``[batch, heads, rows, t]`` in k's dtype, minus infinity where masked."""
    scores = (q[:, :, rows].to(k.dtype) @ k.transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores.add_(mask[:, :, rows])
    if causal:
        row = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(1)
        hidden = torch.arange(k.shape[2], device=q.device) > row
        scores.masked_fill_(hidden, float("-inf"))
    return scores
