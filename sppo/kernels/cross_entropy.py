"""Vocabulary projection and cross entropy in one pass over tiles of tokens.

At most one tile of logits exists, in the dtype of the activations: each tile is projected, its
losses are computed, and its gradient replaces the logits and is propagated through the projection
before the next tile starts.

With logits z of V tokens of the vocabulary, which are the projection times a scale, y the label and
lse = log sum_v exp z_v, the loss of a token is

    lse - (1 - s) z_y - s mean_v(z_v) + c lse^2

where s is the label smoothing (Szegedy et al., 2016, section 7) and c the weight of the z-loss that
keeps lse near zero (Chowdhery et al., 2022, section 5). The gradient of the loss is
``(1 + 2 c lse) softmax(z)_v - (1 - s) [v = y] - s / V``.

A prediction is correct if no logit exceeds that of the label: a tie counts as correct, NaN never.

Every token has a label that counts: :class:`sppo.engine.unit.UnitLabels` selects them.

Legend: L tokens, t tokens of a tile, r rows of a tile, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from sppo.cost.tiles import tile_tokens
from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.fused import fused
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
    hidden_LE: Tensor,
    weight_VE: Tensor,
    labels_L: Tensor,
    *,
    terms: LossTerms = CROSS_ENTROPY,
    logits_scale: float = 1.0,
    tile_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (loss of each token in fp32 or better, whether its prediction is correct), ``[L]``."""
    losses_L, correct_L = _results_of(hidden_LE)
    for rows in _tiles(hidden_LE, weight_VE, tile_bytes):
        logits_tV = linear(hidden_LE[rows], weight_VE)
        losses_L[rows], correct_L[rows] = token_losses(
            logits_tV, labels_L[rows], terms=terms, logits_scale=logits_scale
        )
        del logits_tV  # before the next tile is made
    return losses_L, correct_L


def linear_cross_entropy_with_gradient(
    hidden_LE: Tensor,
    weight_VE: Tensor,
    labels_L: Tensor,
    *,
    scale: float,
    dweight_VE: Tensor | None,
    terms: LossTerms = CROSS_ENTROPY,
    logits_scale: float = 1.0,
    tile_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses and the input gradient of ``scale * losses.sum()``; add to ``dweight_VE``.

    Args:
        hidden_LE: Input of the projection.
        weight_VE: Weight of the projection.
        labels_L: Target token of each position.
        scale: Factor of the loss, one over the valid labels of the global batch.
        dweight_VE: fp32 (float64) accumulator of the weight gradient, added to in place; None if
            the weight is frozen.
        terms: Terms of the loss besides the cross entropy.
        logits_scale: Factor of the logits.
        tile_bytes: Upper bound of the bytes of one tile of logits; None for the device's default.

    Returns:
        (losses ``[L]`` in fp32 or better, unscaled; whether predictions are correct ``[L]``;
        dhidden_LE in hidden's dtype).
    """
    (losses_L, correct_L), dhidden_LE = _results_of(hidden_LE), torch.empty_like(hidden_LE)
    for rows in _tiles(hidden_LE, weight_VE, tile_bytes):
        hidden_tE = hidden_LE[rows]
        logits_tV = linear(hidden_tE, weight_VE)
        losses_L[rows], correct_L[rows] = token_losses(
            logits_tV, labels_L[rows], scale=scale, terms=terms, logits_scale=logits_scale
        )
        input_gradient(logits_tV, weight_VE, into_CI=dhidden_LE[rows])
        if dweight_VE is not None:
            accumulate_weight_gradient(dweight_VE, logits_tV, hidden_tE)
        del logits_tV  # before the next tile is made
    return losses_L, correct_L, dhidden_LE


def token_losses(
    logits_tV: Tensor,
    labels_t: Tensor,
    *,
    scale: float | None = None,
    terms: LossTerms = CROSS_ENTROPY,
    logits_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and whether its prediction is correct; overwrite the logits.

    Args:
        logits_tV: Logits before their scale; with a scale of the loss overwritten by the gradient
            of ``scale * losses.sum()``, else by anything.
        labels_t: Target of each row.
        scale: Factor of the loss in the gradient; None for no gradient.
        terms: Terms of the loss besides the cross entropy.
        logits_scale: Factor of the logits.

    Returns:
        (losses ``[t]`` in fp32 or better, unscaled; correct predictions, bool ``[t]``).
    """
    if fused(logits_tV):
        from sppo.kernels.triton.cross_entropy import cross_entropy

        return cross_entropy(
            logits_tV, labels_t, scale=scale, logits_scale=logits_scale, **asdict(terms)
        )
    losses_t, correct_t = _results_of(logits_tV)
    for rows in row_tiles(logits_tV):
        losses_t[rows], correct_t[rows] = _row_losses(
            logits_tV[rows], labels_t[rows], scale, terms, logits_scale
        )
    return losses_t, correct_t


def _row_losses(
    logits_rV: Tensor,
    labels_r: Tensor,
    scale: float | None,
    terms: LossTerms,
    logits_scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`token_losses` of a tile of rows; temporaries are freed on return.

    Overwrites logits that have the accumulation dtype by their exponentials ``exp(z - max z)``.
    """
    smoothing, z_loss, label_r1 = terms.label_smoothing, terms.z_loss, labels_r.unsqueeze(1)
    rows_rV = logits_rV.to(accumulation_dtype(logits_rV.dtype))
    if logits_scale != 1:
        rows_rV.mul_(logits_scale)
    wanted_r, top_r = rows_rV.gather(1, label_r1).squeeze(1), rows_rV.amax(1)
    correct_r = wanted_r == top_r
    wanted_r.mul_(1 - smoothing)
    if smoothing:
        wanted_r += smoothing * rows_rV.mean(1)
    rows_rV.sub_(top_r.unsqueeze(1)).exp_()
    sum_r = rows_rV.sum(1)
    lse_r = sum_r.log().add_(top_r)
    losses_r = lse_r - wanted_r
    if z_loss:
        losses_r += z_loss * lse_r.square()
    if scale is not None:
        scale_r = torch.full_like(sum_r, scale * logits_scale)
        rows_rV.mul_((scale_r * (1 + 2 * z_loss * lse_r) / sum_r).unsqueeze(1))
        if smoothing:
            rows_rV.sub_((scale_r * (smoothing / rows_rV.shape[1])).unsqueeze(1))
        rows_rV.scatter_add_(1, label_r1, (scale_r * (smoothing - 1)).unsqueeze(1))
        logits_rV.copy_(rows_rV)
    return losses_r, correct_r


def _results_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate losses, in the accumulation dtype, and correctness of ``rows``."""
    losses = torch.empty(rows.shape[0], dtype=accumulation_dtype(rows.dtype), device=rows.device)
    return losses, torch.empty_like(losses, dtype=torch.bool)


def _tiles(hidden_LE: Tensor, weight_VE: Tensor, tile_bytes: int | None) -> Iterator[slice]:
    tokens = hidden_LE.shape[0]
    size = tile_tokens(
        weight_VE.shape[0],
        element_bytes=hidden_LE.element_size(),
        device=hidden_LE.device.type,
        tile_bytes=tile_bytes,
    )
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
