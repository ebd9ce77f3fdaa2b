"""Vocabulary projection and cross entropy in one pass over tiles of tokens.

Never more than one tile of logits exists: each tile is projected, its losses are taken, its
gradient is formed and pushed back through the projection before the next tile starts.

Legend: C tokens, t tokens of a tile, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sppo.kernels.elementwise import wide_dtype
from sppo.kernels.linear import accumulate_weight_gradient, linear
from sppo.kernels.row_tiles import row_tiles
from sppo.planning.logits_tile import LOGITS_TILE_BYTES, tile_tokens

IGNORED_LABEL = -100
TILE_BYTES = LOGITS_TILE_BYTES


def linear_cross_entropy(
    hidden_CE: Tensor, weight_VE: Tensor, labels_C: Tensor, *, tile_bytes: int = TILE_BYTES
) -> Tensor:
    """Loss of each token, ``[C]`` in fp32 or better; 0 where the label is ignored."""
    losses = []
    for rows in _tiles(hidden_CE.shape[0], weight_VE.shape[0], tile_bytes):
        logits_tV = linear(hidden_CE[rows], weight_VE).to(wide_dtype(hidden_CE.dtype))
        losses.append(_token_losses(logits_tV, _log_sum_exp(logits_tV), labels_C[rows]))
        del logits_tV  # before the next tile is made
    return torch.cat(losses)


def linear_cross_entropy_with_gradient(
    hidden_CE: Tensor,
    weight_VE: Tensor,
    labels_C: Tensor,
    *,
    scale: float,
    dweight_VE: Tensor,
    tile_bytes: int = TILE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of ``scale * losses.sum()``.

    Args:
        hidden_CE: input of the projection.
        weight_VE: the projection.
        labels_C: target token of each position, ``IGNORED_LABEL`` where there is none.
        scale: factor of the loss, one over the valid labels of the global batch.
        dweight_VE: fp32 (float64) accumulator, added to in place.
        tile_bytes: bound of one tile of fp32 logits.

    Returns:
        (losses ``[C]`` in fp32 or better, unscaled; dhidden_CE in hidden's dtype).
    """
    losses, dhidden_CE = [], torch.empty_like(hidden_CE)
    for rows in _tiles(hidden_CE.shape[0], weight_VE.shape[0], tile_bytes):
        hidden_tE, labels_t = hidden_CE[rows], labels_C[rows]
        logits_tV = linear(hidden_tE, weight_VE).to(wide_dtype(hidden_CE.dtype))
        lse_t = _log_sum_exp(logits_tV)
        losses.append(_token_losses(logits_tV, lse_t, labels_t))
        dlogits_tV = _logit_gradient_(logits_tV, lse_t, labels_t, scale).to(hidden_CE.dtype)
        torch.mm(dlogits_tV, weight_VE, out=dhidden_CE[rows])
        accumulate_weight_gradient(dweight_VE, dlogits_tV, hidden_tE)
        del logits_tV, dlogits_tV  # before the next tile is made
    return torch.cat(losses), dhidden_CE


def _tiles(tokens: int, vocab_size: int, tile_bytes: int) -> Iterator[slice]:
    size = tile_tokens(vocab_size, tile_bytes=tile_bytes)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _log_sum_exp(logits_tV: Tensor) -> Tensor:
    """Of each row, ``[t]``; torch's own makes a second tile of exponentials."""
    return torch.cat([logits_tV[rows].logsumexp(-1) for rows in row_tiles(logits_tV)])


def _token_losses(logits_tV: Tensor, lse_t: Tensor, labels_t: Tensor) -> Tensor:
    valid = labels_t != IGNORED_LABEL
    target = logits_tV.gather(1, labels_t.clamp(min=0).unsqueeze(1)).squeeze(1)
    return (lse_t - target).masked_fill_(~valid, 0.0)


def _logit_gradient_(logits_tV: Tensor, lse_t: Tensor, labels_t: Tensor, scale: float) -> Tensor:
    """``scale * (softmax - one_hot)`` in place of the logits; zero rows where ignored."""
    valid = labels_t != IGNORED_LABEL
    gradient = logits_tV.sub_(lse_t.unsqueeze(1)).exp_()
    target = labels_t.clamp(min=0).unsqueeze(1)
    gradient.scatter_add_(1, target, gradient.new_full(target.shape, -1.0))
    return gradient.mul_((valid.to(gradient.dtype) * scale).unsqueeze(1))
