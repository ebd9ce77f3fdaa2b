"""Settings that families with rotary positions share."""

from __future__ import annotations

from collections.abc import Mapping

from sppo.config.huggingface.settings import Choice, Json, Key, flag, integer, number
from sppo.config.huggingface.tensor_names import EXPERT


def _init_std(config: Json, key: str) -> float:
    """Return the deviation of random initial weights, which must not be all zero."""
    return number(config, key) or 0.02


def num_heads(config: Json) -> int:
    """Return the number of query heads."""
    return integer(config, "num_attention_heads")


def head_size(config: Json) -> int:
    """Return the size of a head that no key names."""
    hidden, heads = integer(config, "hidden_size"), num_heads(config)
    if hidden % heads:
        raise ValueError(
            f"config.json has hidden_size {hidden}, not a multiple of num_attention_heads {heads}, "
            "and no head_dim"
        )
    return hidden // heads


COMMON = (
    Key("vocab_size", "vocab_size", integer),
    Key("init_std", "initializer_range", _init_std),
    Key("tie_embeddings", "tie_word_embeddings", flag),
)
_SILU = {"silu": "swiglu", "swish": "swiglu"}


def rotary(
    *, activation: str = "hidden_act", words: Mapping[str, str] = _SILU, mlp_size: bool = True
) -> tuple[Key | Choice, ...]:
    """Return the settings of sizes, activation and norms.

    Args:
        activation: Key of the activation.
        words: Activations by the words under that key.
        mlp_size: Whether the model has MLPs of ``intermediate_size``.
    """
    size = (Key("mlp_size", "intermediate_size", integer),) if mlp_size else ()
    return (
        *COMMON,
        Key("hidden_size", "hidden_size", integer),
        Key("num_layers", "num_hidden_layers", integer),
        Key("num_heads", "num_attention_heads", integer),
        Key("num_kv_heads", "num_key_value_heads", integer, if_null=num_heads),
        Key("head_size", "head_dim", integer, if_null=head_size),
        *size,
        Choice("mlp", activation, words),
        Key("norm_eps", "rms_norm_eps", number),
        Key("max_positions", "max_position_embeddings", integer),
    )


QKV_BIAS = Key("qkv_bias", "attention_bias", flag)
BIASES = (QKV_BIAS, Key("output_bias", "attention_bias", flag))

DEFAULTS: Json = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}

EXPERT_MODULES = {
    "router": "mlp.gate",
    "expert_gate": f"mlp.experts.{EXPERT}.gate_proj",
    "expert_up": f"mlp.experts.{EXPERT}.up_proj",
    "expert_down": f"mlp.experts.{EXPERT}.down_proj",
}
"""Modules of experts in most families."""


def routed(count: str, mlp_size: str) -> tuple[Key, ...]:
    """Return the settings of experts with weights that may be normalized.

    Args:
        count: Key of the number of experts.
        mlp_size: Key of the width of one.
    """
    return (
        Key("experts.count", count, integer),
        Key("experts.per_token", "num_experts_per_tok", integer),
        Key("experts.mlp_size", mlp_size, integer),
        Key("experts.normalize", "norm_topk_prob", flag),
    )
