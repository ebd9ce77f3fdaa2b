"""Granite: Llama's layers with factors of embeddings, scores, residual stream and logits."""

from __future__ import annotations

from sppo.config.huggingface.families.common import BIASES, DEFAULTS, rotary
from sppo.config.huggingface.families.refused import DENSE_REFUSED
from sppo.config.huggingface.family import HfFamily
from sppo.config.huggingface.layer_patterns import Windows, never
from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import Json, Key, flag, number, positive, score_scale
from sppo.config.huggingface.tensor_names import ROTARY_MODULES, TensorNames


def _inverse(config: Json, key: str) -> float:
    """Return the factor of logits; the key holds their divisor."""
    return 1 / positive(config, key)


GRANITE = HfFamily(
    architecture="GraniteForCausalLM",
    settings=(
        *rotary(),
        *BIASES,
        Key("mlp_bias", "mlp_bias", flag),
        Key("embedding_scale", "embedding_multiplier", number),
        Key("attention_scale", "attention_multiplier", number, form=score_scale),
        Key("residual_scale", "residual_multiplier", number),
        Key("logits_scale", "logits_scaling", _inverse, form=lambda model: 1 / model.logits_scale),
        Windows(never),
        Rope(),
    ),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 2048,
        **dict.fromkeys(("embedding_multiplier", "attention_multiplier"), 1.0),
        **dict.fromkeys(("residual_multiplier", "logits_scaling"), 1.0),
    },
    tensors=TensorNames(modules=ROTARY_MODULES),
    refused=DENSE_REFUSED,
)
