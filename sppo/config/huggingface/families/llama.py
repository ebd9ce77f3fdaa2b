"""Llama and dense families with its layers."""

from __future__ import annotations

from sppo.config.huggingface.families.common import BIASES, DEFAULTS, num_heads, rotary
from sppo.config.huggingface.families.refused import DENSE_REFUSED
from sppo.config.huggingface.family import HfFamily
from sppo.config.huggingface.layer_patterns import Windows, always, never
from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import Derived, Json, Key, flag, integer, refusal
from sppo.config.huggingface.tensor_names import ROTARY_MODULES, TensorNames

_NAMES = TensorNames(modules=ROTARY_MODULES)


def _multiple_of_heads(config: Json) -> int:
    """Return the hidden size; LlamaConfig checks this even if head_dim is given."""
    hidden, heads = integer(config, "hidden_size"), num_heads(config)
    if hidden % heads:
        raise refusal("hidden_size", hidden, f"a multiple of num_attention_heads {heads}")
    return hidden


LLAMA = HfFamily(
    architecture="LlamaForCausalLM",
    settings=(
        *rotary(),
        Derived("hidden_size", _multiple_of_heads),
        *BIASES,
        Key("mlp_bias", "mlp_bias", flag),
        Windows(never),
        Rope(),
    ),
    defaults={**DEFAULTS, "max_position_embeddings": 2048},
    tensors=_NAMES,
    refused=DENSE_REFUSED,
)
MISTRAL = HfFamily(
    architecture="MistralForCausalLM",
    settings=(*rotary(), Windows(always, by_layer=False), Rope()),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    tensors=_NAMES,
    refused=DENSE_REFUSED,
)
