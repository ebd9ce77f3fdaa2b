"""Llama and dense families with its layers."""

from __future__ import annotations

from sppo.config.huggingface.families.common import BIASES, DEFAULTS, QKV_BIAS, num_heads, rotary
from sppo.config.huggingface.families.refused import DENSE_REFUSED
from sppo.config.huggingface.family import HfFamily
from sppo.config.huggingface.layer_patterns import (
    RotaryLayers,
    Windows,
    always,
    never,
    without_rotation,
)
from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import Derived, Json, Key, flag, integer, refusal
from sppo.config.huggingface.tensor_names import ROTARY_MODULES, TensorNames

_NAMES = TensorNames(modules=ROTARY_MODULES)
_MLP_BIAS = Key("mlp_bias", "mlp_bias", flag)
_MISTRAL: Json = {
    **DEFAULTS,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def _multiple_of_heads(config: Json) -> int:
    """Return the hidden size; LlamaConfig checks this even if head_dim is given."""
    hidden, heads = integer(config, "hidden_size"), num_heads(config)
    if hidden % heads:
        raise refusal("hidden_size", hidden, f"a multiple of num_attention_heads {heads}")
    return hidden


_LLAMA = (
    Derived("hidden_size", _multiple_of_heads),
    *BIASES,
    _MLP_BIAS,
    Windows(never),
    Rope(),
)
LLAMA = HfFamily(
    architecture="LlamaForCausalLM",
    settings=(*rotary(), *_LLAMA),
    defaults={**DEFAULTS, "max_position_embeddings": 2048},
    tensors=_NAMES,
    refused=DENSE_REFUSED,
)
ARCEE = HfFamily(
    architecture="ArceeForCausalLM",
    settings=(*rotary(words={"relu2": "relu2"}), *_LLAMA),
    defaults={
        **DEFAULTS,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    },
    tensors=_NAMES,
    refused=DENSE_REFUSED,
)
MISTRAL = HfFamily(
    architecture="MistralForCausalLM",
    settings=(*rotary(), Windows(always, by_layer=False), Rope()),
    defaults=_MISTRAL,
    tensors=_NAMES,
    refused=DENSE_REFUSED,
)
MINISTRAL = HfFamily(
    architecture="MinistralForCausalLM",
    settings=(*rotary(), Windows(always), Rope()),
    defaults=_MISTRAL,
    tensors=_NAMES,
    refused=DENSE_REFUSED,
)
SMOLLM3 = HfFamily(
    architecture="SmolLM3ForCausalLM",
    settings=(
        *rotary(),
        *BIASES,
        _MLP_BIAS,
        RotaryLayers(),
        Windows(without_rotation, switch=True),
        Rope(theta=2e6),
    ),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    tensors=_NAMES,
    refused=DENSE_REFUSED,
)
SEED_OSS = HfFamily(
    architecture="SeedOssForCausalLM",
    settings=(
        *rotary(),
        QKV_BIAS,
        Key("output_bias", "attention_out_bias", flag),
        _MLP_BIAS,
        Windows(never),
        Rope(),
    ),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    },
    tensors=_NAMES,
    refused=DENSE_REFUSED,
    no_dropout=("attention_dropout", "residual_dropout"),
)
PHI3 = HfFamily(
    architecture="Phi3ForCausalLM",
    settings=(*rotary(), Windows(always, by_layer=False), Rope(types=(), fraction=1.0)),
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    tensors=TensorNames(
        modules={
            **ROTARY_MODULES,
            **dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj"),
            **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
        }
    ),
    refused=DENSE_REFUSED,
    no_dropout=("attention_dropout", "resid_pdrop", "embd_pdrop"),
)
