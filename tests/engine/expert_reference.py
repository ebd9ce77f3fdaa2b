"""Autograd oracle of mixtures of experts: every expert by itself, and the losses of the routers.

Legend: S tokens, E hidden, X experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sppo.config.model import ModelConfig
from sppo.config.routing import RoutingConfig


class Routed(NamedTuple):
    """Output of the experts of one layer, and how its tokens were routed."""

    out_SE: Tensor
    logits_SX: Tensor
    chosen_Sk: Tensor


def mixture(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    prefix: str,
    x_SE: Tensor,
    *,
    chosen: Tensor | None = None,
) -> Routed:
    """Experts of the layer whose parameters begin with ``prefix``; ``chosen`` replaces a choice."""
    own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    experts = model.experts
    logits = x_SE @ own["router.weight"].T + own.get("router.bias", 0)
    if chosen is None:
        chosen = _choice(model, logits, own.get("router.choice_bias"))
    if experts.score == "softmax_chosen":
        weight_of = logits.gather(1, chosen).softmax(-1)
    else:
        weight_of = _scores(model, logits).gather(1, chosen)
        if experts.normalize:
            weight_of = weight_of / weight_of.sum(-1, keepdim=True)
    out = torch.zeros_like(x_SE)
    for expert in range(experts.count):
        of_expert = {
            n: own[f"expert_{n}"][expert]
            for n in (
                "gate.weight",
                "up.weight",
                "down.weight",
                "gate.bias",
                "up.bias",
                "down.bias",
            )
            if f"expert_{n}" in own
        }
        weight = (weight_of * (chosen == expert)).sum(1, keepdim=True) * experts.scale
        out = out + weight * _glu(model, of_expert, x_SE)
    if experts.shared_mlp_size:
        shared = _glu(model, {n.removeprefix("shared_"): w for n, w in own.items()}, x_SE)
        if experts.shared_switch:
            shared = shared * (x_SE @ own["shared_switch.weight"].T).sigmoid()
        out = out + shared
    return Routed(out, logits, chosen)


def routing_loss(model: ModelConfig, routing: RoutingConfig, routed: Routed) -> Tensor:
    """Balance and z-loss of one layer and sequence, by their definitions."""
    experts, logits = model.experts, routed.logits_SX
    shares = _scores(model, logits)
    shares = shares / shares.sum(-1, keepdim=True)
    counts = functional.one_hot(routed.chosen_Sk, experts.count).sum((0, 1)).to(logits.dtype)
    balance = experts.count * (counts / len(logits) * shares.mean(0)).sum()
    z = logits.logsumexp(-1).square().mean()
    return routing.balance_loss * balance + routing.z_loss * z


def _scores(model: ModelConfig, logits_SX: Tensor) -> Tensor:
    return logits_SX.sigmoid() if model.experts.score == "sigmoid" else logits_SX.softmax(-1)


def _choice(model: ModelConfig, logits_SX: Tensor, bias_X: Tensor | None) -> Tensor:
    experts = model.experts
    scores = _scores(model, logits_SX.detach())
    scores = scores if bias_X is None else scores + bias_X
    groups = scores.unflatten(1, (experts.groups, -1))
    if experts.groups > 1:
        best = groups.sort(-1, descending=True).values[..., :2].sum(-1)
        limit = best.sort(-1, descending=True).values[:, experts.groups_per_token - 1, None]
        groups = groups.masked_fill((best < limit)[..., None], float("-inf"))
    return groups.flatten(1).argsort(-1, descending=True)[:, : experts.per_token]


def _glu(model: ModelConfig, own: Mapping[str, Tensor], x_SE: Tensor) -> Tensor:
    gate, up = (x_SE @ own[f"{n}.weight"].T + own.get(f"{n}.bias", 0) for n in ("gate", "up"))
    if model.mlp == "swiglu":
        hidden = gate * gate.sigmoid() * up
    elif model.mlp == "geglu_tanh":
        hidden = functional.gelu(gate, approximate="tanh") * up
    else:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        hidden = gate * (1.702 * gate).sigmoid() * (up + 1)
    return hidden @ own["down.weight"].T + own.get("down.bias", 0)
