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

from sppo.config.model import LayerType, ModelConfig
from sppo.cost.trainable import Trainable
from sppo.engine.unit import SequenceData, document_positions
from sppo.kernels.cross_entropy import CROSS_ENTROPY, LossTerms
from sppo.kernels.labels import IGNORED_LABEL
from sppo.model.rope import rotary_frequencies
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
) -> Tensor:
    """Mean loss over all valid labels of ``sequences``; differentiable in ``weights``."""
    losses = [reference_token_losses(model, weights, data, terms=terms) for data in sequences]
    total = torch.stack([of_sequence.sum() for of_sequence in losses]).sum()
    return total / sum(data.num_valid for data in sequences)


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
    model: ModelConfig, weights: Mapping[str, Tensor], data: SequenceData
) -> Tensor:
    """Logits of each token, ``[S, V]``."""
    positions = document_positions(len(data.tokens_S), data.document_starts)
    x = weights["embed.weight"][data.tokens_S]
    if model.position == "learned":
        x = x + weights["positions.weight"][positions]
    for index in range(model.num_layers):
        x = _layer(model, weights, f"layers.{index}.", x, positions, data, index)
    hidden = _norm(model, weights, "final_norm", x)
    head = weights["embed.weight" if model.tie_embeddings else "head.weight"]
    return hidden @ head.T


def _layer(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    prefix: str,
    x_SE: Tensor,
    positions_S: Tensor,
    data: SequenceData,
    index: int,
) -> Tensor:
    n1 = _norm(model, weights, prefix + "attention_norm", x_SE)
    q, k, v = (
        _linear(weights, prefix + name, n1).view(len(x_SE), -1, model.head_dim) for name in "qkv"
    )
    if model.qk_norm:
        q = _rms(q, weights[prefix + "q_norm.weight"], model.norm_eps)
        k = _rms(k, weights[prefix + "k_norm.weight"], model.norm_eps)
    layer_type = model.layer_type(index)
    if layer_type.rope_theta is not None:
        q, k = (_rotate(model, layer_type, x, positions_S) for x in (q, k))
    visible = visible_pairs(
        len(x_SE),
        len(x_SE),
        window=layer_type.window,
        document_starts=data.document_starts,
    )
    k, v = (x.repeat_interleave(model.group_size, dim=1) for x in (k, v))
    scores = torch.einsum("snd,tnd->nst", q, k) / model.head_dim**0.5
    weight_of = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    o = torch.einsum("nst,tnd->snd", weight_of, v).flatten(1)
    x_mid = x_SE + _linear(weights, prefix + "o", o)
    n2 = _norm(model, weights, prefix + "mlp_norm", x_mid)
    return x_mid + _linear(weights, prefix + "down", _mlp_hidden(model, weights, prefix, n2))


def _mlp_hidden(
    model: ModelConfig, weights: Mapping[str, Tensor], prefix: str, n2_SE: Tensor
) -> Tensor:
    up = _linear(weights, prefix + "up", n2_SE)
    if model.mlp == "swiglu":
        gate = _linear(weights, prefix + "gate", n2_SE)
        return gate * gate.sigmoid() * up
    return functional.gelu(up, approximate="tanh" if model.mlp == "gelu_tanh" else "none")


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[name + ".weight"].T
    bias = weights.get(name + ".bias")
    return y if bias is None else y + bias


def _norm(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = weights[name + ".weight"]
    if model.norm == "rmsnorm":
        return _rms(x, weight, model.norm_eps)
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + model.norm_eps).sqrt() * weight + weights[name + ".bias"]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight


def _rotate(
    model: ModelConfig, layer_type: LayerType, x_SHD: Tensor, positions_S: Tensor
) -> Tensor:
    wide = torch.promote_types(x_SHD.dtype, torch.float32)
    frequencies, scale = rotary_frequencies(model, layer_type, dtype=wide)
    turn = torch.polar(
        torch.full((len(positions_S), 1, len(frequencies)), scale, dtype=wide),
        (positions_S.to(wide)[:, None] * frequencies).unsqueeze(1),
    )
    first, second = x_SHD.to(wide).chunk(2, dim=-1)
    turned = torch.complex(first, second) * turn
    return torch.cat((turned.real, turned.imag), -1).to(x_SHD.dtype)
