"""Attention blocks in plain torch operations, for cases that no faster kernel supports.

The kernel runs on every device and in every dtype. Scores exist for one tile of rows at a time, so
memory grows with the keys of a block and not with its rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sppo.cost.tiles import SCORES_TILE_BYTES
from sppo.kernels.attention.block_attention import BlockCall


class TorchBlocks:
    """Block kernel of matrix products, computed in fp32 or better."""

    def forward(self, call: BlockCall) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of one block by plain torch operations, tile by tile."""
        q, acc_dtype = call.q, torch.promote_types(call.q.dtype, torch.float32)
        k, v = call.k.to(acc_dtype), call.v.to(acc_dtype)
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=acc_dtype, device=q.device)
        for rows in _tiles(q, k):
            scores = _scores(call, k, rows)
            lse[:, :, rows] = scores.logsumexp(-1)
            weights = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            o[:, :, rows] = (weights @ v).to(o.dtype)
            del scores, weights  # before the next tile is made
        return o, lse

    def backward(
        self, call: BlockCall, do: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of one block in fp32 or better, tile by tile."""
        q, acc_dtype = call.q, torch.promote_types(call.q.dtype, torch.float32)
        k, v = call.k.to(acc_dtype), call.v.to(acc_dtype)
        dq = torch.empty(q.shape, dtype=acc_dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=acc_dtype, device=q.device) for x in (k, v))
        for rows in _tiles(q, k):
            do_rows, q_rows = do[:, :, rows].to(acc_dtype), q[:, :, rows].to(acc_dtype)
            weights = _scores(call, k, rows).sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            dv += weights.transpose(-1, -2) @ do_rows
            delta = (do_rows * o[:, :, rows]).sum(-1, keepdim=True)
            dscores = (do_rows @ v.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(call.scale)
            dq[:, :, rows] = dscores @ k
            dk += dscores.transpose(-1, -2) @ q_rows
            del weights, dscores  # before the next tile is made
        return dq, dk, dv


def _tiles(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yield slices of rows whose scores have at most SCORES_TILE_BYTES, at least one row each."""
    batch, heads, rows, _ = q.shape
    step = max(1, SCORES_TILE_BYTES // (batch * heads * k.shape[2] * k.element_size()))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _scores(call: BlockCall, k: Tensor, rows: slice) -> Tensor:
    """Return the scores ``[batch, heads, rows, t]`` in k's dtype, minus infinity where masked."""
    scores = (call.q[:, :, rows].to(k.dtype) @ k.transpose(-1, -2)).mul_(call.scale)
    if call.mask is not None:
        scores.add_(call.mask[:, :, rows])
    if call.causal:
        row = torch.arange(rows.start, rows.stop, device=k.device).unsqueeze(1)
        hidden = torch.arange(k.shape[2], device=k.device) > row
        scores.masked_fill_(hidden, float("-inf"))
    return scores
