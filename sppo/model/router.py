"""Router of a mixture of experts: the experts that a token chooses, and the weights of each.

All is computed from the router's logits in fp32 or better. The choice is made once, in forward:
backward reads it, since near ties would fall otherwise when rounding differs. It is a constant, so
gradients reach the logits through the weights of the chosen experts, and through two losses:

balance  factor X sum_e f_e P_e of each sequence, with f_e the tokens that chose expert e over all
         its S tokens, and P_e the mean share of e: softmax of the logits, or with sigmoid scores
         the score over the sum of the token's scores. Its gradient at a share needs f_e only.
z        factor times the mean square of the log-sum-exp of the logits

Legend: C tokens, E hidden, X experts, k experts per token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo.config.model import Experts
from sppo.kernels.linear import wide_linear

_LEAST_SUM = 1e-20
"""Added to the sum by which weights are divided, as in published models."""


@dataclass(frozen=True, slots=True)
class RoutingTerms:
    """Terms of the routing of one layer and sequence beside the logits."""

    choice_bias_X: Tensor | None = None
    """Added to the scores of the experts, in fp32, for the choice only; None for none."""
    balance_X: Tensor | None = None
    """Gradient of the balance loss at the share of each expert, fp32; None without the loss."""
    z_loss: float = 0.0
    """Factor of the sum of the squared log-sum-exps."""


NO_TERMS = RoutingTerms()


def router_logits(n2_CE: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the logits ``[C, X]``, which are never rounded to the compute dtype."""
    return wide_linear(n2_CE, weights["router.weight"], weights.get("router.bias"))


def choose(logits_CX: Tensor, experts: Experts, choice_bias_X: Tensor | None) -> Tensor:
    """Return the experts that each token chooses, int16 ``[C, k]``."""
    choice_CX = logits_CX
    if experts.score != "softmax_chosen":
        choice_CX = _scores(logits_CX, experts)
    if choice_bias_X is not None:
        choice_CX = choice_CX + choice_bias_X
    if experts.groups > 1:
        choice_CX = _in_best_groups(choice_CX, experts)
    return choice_CX.topk(experts.per_token, dim=-1).indices.to(torch.int16)


def weights_of_chosen(logits_CX: Tensor, chosen_Ck: Tensor, experts: Experts) -> Tensor:
    """Return the weights of the chosen experts, ``[C, k]``."""
    index_Ck = chosen_Ck.long()
    if experts.score == "softmax_chosen":
        return logits_CX.gather(1, index_Ck).softmax(-1).mul_(experts.scale)
    weights_Ck = _scores(logits_CX, experts).gather(1, index_Ck)
    if experts.normalize:
        weights_Ck /= weights_Ck.sum(-1, keepdim=True) + _LEAST_SUM
    return weights_Ck.mul_(experts.scale)


def logits_gradient(
    dweights_Ck: Tensor,
    logits_CX: Tensor,
    chosen_Ck: Tensor,
    experts: Experts,
    terms: RoutingTerms,
) -> Tensor:
    """Return the gradient of the logits ``[C, X]``, given that of the weights of the chosen."""
    shares_CX = logits_CX.softmax(-1)
    dlogits_CX = torch.zeros_like(logits_CX)
    index_Ck, dchosen_Ck = chosen_Ck.long(), dweights_Ck * experts.scale
    if experts.score == "softmax_chosen":
        of_chosen = logits_CX.gather(1, index_Ck).softmax(-1)
        dlogits_CX.scatter_add_(1, index_Ck, _softmax_backward(dchosen_Ck, of_chosen))
    else:
        scores_CX = shares_CX if experts.score == "softmax" else logits_CX.sigmoid()
        if experts.normalize:
            dchosen_Ck = _share_backward(dchosen_Ck, scores_CX.gather(1, index_Ck))
        dscores_CX = torch.zeros_like(logits_CX).scatter_add_(1, index_Ck, dchosen_Ck)
        dlogits_CX += _scores_backward(dscores_CX, scores_CX, experts)
    if terms.balance_X is not None and experts.score == "sigmoid":
        scores_CX = logits_CX.sigmoid()
        dscores_CX = _share_backward(terms.balance_X, scores_CX)
        dlogits_CX += _scores_backward(dscores_CX, scores_CX, experts)
    elif terms.balance_X is not None:
        dlogits_CX += _softmax_backward(terms.balance_X, shares_CX)
    if terms.z_loss:
        lse_C1 = logits_CX.logsumexp(-1, keepdim=True)
        dlogits_CX.addcmul_(shares_CX, lse_C1, value=2 * terms.z_loss)
    return dlogits_CX


def _scores(logits_CX: Tensor, experts: Experts) -> Tensor:
    return logits_CX.sigmoid() if experts.score == "sigmoid" else logits_CX.softmax(-1)


def _scores_backward(dscores_CX: Tensor, scores_CX: Tensor, experts: Experts) -> Tensor:
    if experts.score == "sigmoid":
        return dscores_CX * scores_CX * (1 - scores_CX)
    return _softmax_backward(dscores_CX, scores_CX)


def _softmax_backward(dshares: Tensor, shares: Tensor) -> Tensor:
    return shares * (dshares - (dshares * shares).sum(-1, keepdim=True))


def _share_backward(dshares: Tensor, scores: Tensor) -> Tensor:
    """Return the gradient of scores of which each was divided by the sum of all of its token."""
    total = scores.sum(-1, keepdim=True) + _LEAST_SUM
    return (dshares - (dshares * scores / total).sum(-1, keepdim=True)) / total


def _in_best_groups(choice_CX: Tensor, experts: Experts) -> Tensor:
    """Return the scores of the experts in the groups with the best two experts; others -inf."""
    grouped_CGx = choice_CX.view(len(choice_CX), experts.groups, -1)
    best_CG = grouped_CGx.topk(2, dim=-1).values.sum(-1)
    chosen = best_CG.topk(experts.groups_per_token, dim=-1).indices
    outside_CG = torch.ones_like(best_CG, dtype=torch.bool).scatter_(1, chosen, False)
    best: Tensor = grouped_CGx.masked_fill(outside_CG.unsqueeze(-1), float("-inf")).flatten(1)
    return best
