"""Autograd oracle of the tests: the same models on whole sequences, with no cutting and no storage.

Written from the definition of each operation, with nothing in common with the explicit passes but
the rotary frequencies, so that agreement means something.

Legend: S tokens, E hidden, N query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sppo.config.model import LayerType, ModelConfig, Rotation
from sppo.config.routing import NO_ROUTING_LOSSES, RoutingConfig
from sppo.cost.trainable import Trainable
from sppo.engine.unit import SequenceData, document_positions
from sppo.kernels.cross_entropy import CROSS_ENTROPY, LossTerms
from sppo.kernels.labels import IGNORED_LABEL
from sppo.model.rope import rotary_frequencies
from tests.engine.expert_reference import Routed, mixture, routing_loss
from tests.engine.linear_reference import linear_attention
from tests.kernels.attention.reference import visible_pairs


def merged(weights: Mapping[str, Tensor], trainable: Trainable) -> Mapping[str, Tensor]:
    """Weights of the model, with the products of the factors of adapters added."""
    if trainable.adapter is None:
        return weights
    found = dict(weights)
    for name in weights:
        if name.endswith(".lora_a"):
            target = name.removesuffix(".lora_a")
            product = weights[f"{target}.lora_b"] @ weights[name]
            weight = found[f"{target}.weight"]
            found[f"{target}.weight"] = weight + trainable.adapter.scale * product
    return found


def reference_loss(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    sequences: Sequence[SequenceData],
    *,
    terms: LossTerms = CROSS_ENTROPY,
    routing: RoutingConfig = NO_ROUTING_LOSSES,
) -> Tensor:
    """Mean loss over all valid labels of ``sequences``; differentiable in ``weights``.

    To its gradient, not to its value, the losses of the routers are added.
    """
    losses = [reference_token_losses(model, weights, data, terms=terms) for data in sequences]
    total = torch.stack([of_sequence.sum() for of_sequence in losses]).sum()
    loss = total / sum(data.num_valid for data in sequences)
    if routing != NO_ROUTING_LOSSES:
        tokens = sum(len(data.tokens_S) for data in sequences)
        for data in sequences:
            routed: list[Routed] = []
            reference_logits(model, weights, data, routed=routed)
            for of_layer in routed:
                of_router = routing_loss(model, routing, of_layer) * (len(data.tokens_S) / tokens)
                loss = loss + of_router - of_router.detach()
    return loss


def reference_token_losses(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    data: SequenceData,
    *,
    terms: LossTerms = CROSS_ENTROPY,
) -> Tensor:
    """Loss of each token, ``[S]``."""
    return token_losses_of(reference_logits(model, weights, data), data.labels_S, terms=terms)


def token_losses_of(logits: Tensor, labels_S: Tensor, *, terms: LossTerms) -> Tensor:
    """Loss of each token with these logits, ``[S]``."""
    losses = functional.cross_entropy(
        logits,
        labels_S,
        ignore_index=IGNORED_LABEL,
        reduction="none",
        label_smoothing=terms.label_smoothing,
    )
    valid = labels_S != IGNORED_LABEL
    return losses + terms.z_loss * logits.logsumexp(-1).square() * valid


def reference_logits(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    data: SequenceData,
    *,
    routed: list[Routed] | None = None,
) -> Tensor:
    """Logits of each token, ``[S, V]``; adds how experts were chosen to ``routed``."""
    positions = document_positions(len(data.tokens_S), data.document_starts)
    x = weights["embed.weight"][data.tokens_S]
    x = x * torch.tensor(model.embedding_scale, dtype=x.dtype)
    if model.position == "learned":
        x = x + weights["positions.weight"][positions]
    for index in range(model.num_layers):
        x = layer_output(model, weights, f"layers.{index}.", x, positions, data, index, routed)
    hidden = _norm(model, weights, "final_norm", x)
    head = weights["embed.weight" if model.tie_embeddings else "head.weight"]
    return hidden @ head.T * model.logits_scale


def layer_output(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    prefix: str,
    x_SE: Tensor,
    positions_S: Tensor,
    data: SequenceData,
    index: int,
    routed: list[Routed] | None = None,
) -> Tensor:
    """Output ``[S, E]`` of the layer whose parameters begin with ``prefix``."""
    before, behind = model.norm_placement != "post", model.norm_placement != "pre"

    def normed(name: str, x: Tensor, *, there: bool) -> Tensor:
        return _norm(model, weights, prefix + name, x) if there else x

    n1, layer_type = normed("attention_norm", x_SE, there=before), model.layer_type(index)
    if layer_type.linear:
        out = linear_attention(model, weights, prefix, n1, data.document_starts)
    else:
        out = _attention(model, weights, prefix, n1, positions_S, data, layer_type)
    x_mid = x_SE + model.residual_scale * normed("attention_post_norm", out, there=behind)
    n2 = normed("mlp_norm", x_mid, there=before)
    if layer_type.routed:
        of_experts = mixture(model, weights, prefix, n2)
        mlp = of_experts.out_SE
        if routed is not None:
            routed.append(of_experts)
    else:
        mlp = _linear(weights, prefix + "down", _mlp_hidden(model, weights, prefix, n2))
    return x_mid + model.residual_scale * normed("mlp_post_norm", mlp, there=behind)


def _attention(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    prefix: str,
    n1_SE: Tensor,
    positions_S: Tensor,
    data: SequenceData,
    layer_type: LayerType,
) -> Tensor:
    q, k, v = (_linear(weights, prefix + name, n1_SE) for name in "qkv")
    if model.qk_norm == "all":
        q, k = _qk_norm(model, weights, prefix, q, k)
    q, k, v = (x.view(len(n1_SE), -1, model.head_dim) for x in (q, k, v))
    if model.qk_norm == "head":
        q, k = _qk_norm(model, weights, prefix, q, k)
    if layer_type.rotation is not None:
        q, k = (_rotate(model, layer_type.rotation, x, positions_S) for x in (q, k))
    visible = visible_pairs(
        len(n1_SE), len(n1_SE), window=layer_type.window, document_starts=data.document_starts
    )
    k, v = (x.repeat_interleave(model.group_size, dim=1) for x in (k, v))
    scores = torch.einsum("snd,tnd->nst", q, k) * (model.attention_scale or model.head_dim**-0.5)
    scores = scores.masked_fill(~visible, float("-inf"))
    if model.attention_sinks:
        sinks_NS1 = weights[prefix + "sinks.weight"][:, None, None].expand(-1, len(n1_SE), 1)
        scores = torch.cat([scores, sinks_NS1], -1)
    weight_of = scores.softmax(-1)[..., : len(n1_SE)]
    o = torch.einsum("nst,tnd->snd", weight_of, v).flatten(1)
    if model.attention_gate:
        o = o * _linear(weights, prefix + "attention_gate", n1_SE).sigmoid()
    return _linear(weights, prefix + "o", o)


def _qk_norm(
    model: ModelConfig, weights: Mapping[str, Tensor], prefix: str, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    return (
        _rms(model, q, weights[prefix + "q_norm.weight"]),
        _rms(model, k, weights[prefix + "k_norm.weight"]),
    )


def _mlp_hidden(
    model: ModelConfig, weights: Mapping[str, Tensor], prefix: str, n2_SE: Tensor
) -> Tensor:
    up = _linear(weights, prefix + "up", n2_SE)
    gate = _linear(weights, prefix + "gate", n2_SE) if model.gated else up
    if model.mlp == "swiglu":
        return gate * gate.sigmoid() * up
    if model.mlp == "geglu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    if model.mlp == "swiglu_clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * (1.702 * gate).sigmoid() * (up + 1)
    if model.mlp == "relu2":
        return functional.relu(up) ** 2
    return functional.gelu(up, approximate="tanh" if model.mlp == "gelu_tanh" else "none")


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[name + ".weight"].T
    bias = weights.get(name + ".bias")
    return y if bias is None else y + bias


def _norm(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = weights[name + ".weight"]
    if model.norm == "rmsnorm":
        return _rms(model, x, weight)
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + model.norm_eps).sqrt() * weight + weights[name + ".bias"]


def _rms(model: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide / (wide.square().mean(-1, keepdim=True) + model.norm_eps).sqrt()
    if model.norm_offset:
        return (normed * (1 + weight.to(normed.dtype))).to(x.dtype)
    return normed.to(x.dtype) * weight


def _rotate(model: ModelConfig, rotation: Rotation, x_SHD: Tensor, positions_S: Tensor) -> Tensor:
    wide = torch.promote_types(x_SHD.dtype, torch.float32)
    frequencies, scale = rotary_frequencies(model, rotation, dtype=wide)
    turn = torch.polar(
        torch.full((len(positions_S), 1, len(frequencies)), scale, dtype=wide),
        (positions_S.to(wide)[:, None] * frequencies).unsqueeze(1),
    )
    rotated, rest = x_SHD.split([2 * len(frequencies), x_SHD.shape[-1] - 2 * len(frequencies)], -1)
    first, second = rotated.to(wide).chunk(2, dim=-1)
    turned = torch.complex(first, second) * turn
    return torch.cat((turned.real.to(x_SHD.dtype), turned.imag.to(x_SHD.dtype), rest), -1)
