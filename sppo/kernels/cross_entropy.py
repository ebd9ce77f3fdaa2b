"""Vocabulary projection and cross entropy in one pass over tiles of tokens.

At most one tile of logits exists, in the dtype of the activations: each tile is projected, its
losses are computed, and its gradient replaces the logits and is propagated through the projection
before the next tile starts.

With logits z of V tokens of the vocabulary, y the label and lse = log sum_v exp z_v, the loss of a
token is

    lse - (1 - s) z_y - s mean_v(z_v) + c lse^2

where s is the label smoothing (Szegedy et al., 2016, section 7) and c the weight of the z-loss that
keeps lse near zero (Chowdhery et al., 2022, section 5). The gradient of the loss is
``(1 + 2 c lse) softmax(z)_v - (1 - s) [v = y] - s / V``.

Legend: C tokens, t tokens of a tile, r rows of a tile, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from sppo.cost.tiles import tile_tokens
from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.fused import fused
from sppo.kernels.labels import IGNORED_LABEL
from sppo.kernels.linear import accumulate_weight_gradient, input_gradient, linear
from sppo.kernels.row_tiles import row_tiles


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Weights of the terms of a token's loss besides the cross entropy."""

    label_smoothing: float = 0.0
    """s: fraction of the label's weight that is divided equally over the vocabulary."""
    z_loss: float = 0.0
    """c: weight of the squared log-sum-exp."""


CROSS_ENTROPY = LossTerms()
"""The loss terms of the cross entropy alone."""


def linear_cross_entropy(
    hidden_CE: Tensor,
    weight_VE: Tensor,
    labels_C: Tensor,
    *,
    terms: LossTerms = CROSS_ENTROPY,
    tile_bytes: int | None = None,
) -> Tensor:
    """Return the loss of each token, ``[C]`` in fp32 or better; 0 where the label is ignored."""
    losses_C = _losses_of(hidden_CE)
    for rows in _tiles(hidden_CE, weight_VE, tile_bytes):
        logits_tV = linear(hidden_CE[rows], weight_VE)
        losses_C[rows] = token_losses(logits_tV, labels_C[rows], terms=terms)
        del logits_tV  # before the next tile is made
    return losses_C


def linear_cross_entropy_with_gradient(
    hidden_CE: Tensor,
    weight_VE: Tensor,
    labels_C: Tensor,
    *,
    scale: float,
    dweight_VE: Tensor,
    terms: LossTerms = CROSS_ENTROPY,
    tile_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses and the input gradient of ``scale * losses.sum()``; add to ``dweight_VE``.

    Args:
        hidden_CE: Input of the projection.
        weight_VE: Weight of the projection.
        labels_C: Target token of each position, or ``IGNORED_LABEL``.
        scale: Factor of the loss, one over the valid labels of the global batch.
        dweight_VE: fp32 (float64) accumulator of the weight gradient, added to in place.
        terms: Terms of the loss besides the cross entropy.
        tile_bytes: Upper bound of the bytes of one tile of logits; None for the device's default.

    Returns:
        (losses ``[C]`` in fp32 or better, unscaled; dhidden_CE in hidden's dtype).
    """
    losses_C, dhidden_CE = _losses_of(hidden_CE), torch.empty_like(hidden_CE)
    for rows in _tiles(hidden_CE, weight_VE, tile_bytes):
        hidden_tE = hidden_CE[rows]
        logits_tV = linear(hidden_tE, weight_VE)
        losses_C[rows] = token_losses(logits_tV, labels_C[rows], scale=scale, terms=terms)
        input_gradient(logits_tV, weight_VE, into_CI=dhidden_CE[rows])
        accumulate_weight_gradient(dweight_VE, logits_tV, hidden_tE)
        del logits_tV  # before the next tile is made
    return losses_C, dhidden_CE


def token_losses(
    logits_tV: Tensor,
    labels_t: Tensor,
    *,
    scale: float | None = None,
    terms: LossTerms = CROSS_ENTROPY,
) -> Tensor:
    """Return the loss of each row, ``[t]`` in fp32 or better, unscaled; logits are overwritten.

    Args:
        logits_tV: Logits; with a scale overwritten by the gradient of ``scale * losses.sum()``,
            else by anything.
        labels_t: Target of each row, or ``IGNORED_LABEL``.
        scale: Factor of the loss in the gradient; None for no gradient.
        terms: Terms of the loss besides the cross entropy.
    """
    if fused(logits_tV):
        from sppo.kernels.triton.cross_entropy import cross_entropy

        return cross_entropy(logits_tV, labels_t, scale=scale, **asdict(terms))
    losses_t = _losses_of(logits_tV)
    for rows in row_tiles(logits_tV):
        losses_t[rows] = _row_losses(logits_tV[rows], labels_t[rows], scale, terms)
    return losses_t


def _row_losses(
    logits_rV: Tensor, labels_r: Tensor, scale: float | None, terms: LossTerms
) -> Tensor:
    """Compute :func:`token_losses` of a tile of rows; temporaries are freed on return.

    Overwrites logits that have the accumulation dtype by their exponentials ``exp(z - max z)``.
    """
    smoothing, z_loss = terms.label_smoothing, terms.z_loss
    valid_r, label_r1 = labels_r != IGNORED_LABEL, labels_r.clamp(min=0).unsqueeze(1)
    rows_rV = logits_rV.to(accumulation_dtype(logits_rV.dtype))
    wanted_r = rows_rV.gather(1, label_r1).squeeze(1).mul_(1 - smoothing)
    if smoothing:
        wanted_r += smoothing * rows_rV.mean(1)
    top_r = rows_rV.amax(1)
    rows_rV.sub_(top_r.unsqueeze(1)).exp_()
    sum_r = rows_rV.sum(1)
    lse_r = sum_r.log().add_(top_r)
    losses_r = lse_r - wanted_r
    if z_loss:
        losses_r += z_loss * lse_r.square()
    losses_r.masked_fill_(~valid_r, 0.0)
    if scale is not None:
        scale_r = valid_r.to(rows_rV.dtype) * scale
        rows_rV.mul_((scale_r * (1 + 2 * z_loss * lse_r) / sum_r).unsqueeze(1))
        if smoothing:
            rows_rV.sub_((scale_r * (smoothing / rows_rV.shape[1])).unsqueeze(1))
        rows_rV.scatter_add_(1, label_r1, (scale_r * (smoothing - 1)).unsqueeze(1))
        logits_rV.copy_(rows_rV)
    return losses_r


def _losses_of(rows: Tensor) -> Tensor:
    """Allocate the losses of ``rows``, one per row, in the accumulation dtype."""
    return torch.empty(rows.shape[0], dtype=accumulation_dtype(rows.dtype), device=rows.device)


def _tiles(hidden_CE: Tensor, weight_VE: Tensor, tile_bytes: int | None) -> Iterator[slice]:
    tokens = hidden_CE.shape[0]
    size = tile_tokens(
        weight_VE.shape[0],
        element_bytes=hidden_CE.element_size(),
        device=hidden_CE.device.type,
        tile_bytes=tile_bytes,
    )
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
