"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from sppo.config.huggingface.families.common import (
    BIASES,
    DEFAULTS,
    EXPERT_MODULES,
    SWITCHED_MODULES,
    SWITCHED_SIZE,
    rotary,
    routed,
)
from sppo.config.huggingface.families.refused import DENSE_REFUSED, REFUSED
from sppo.config.huggingface.family import HfFamily
from sppo.config.huggingface.layer_patterns import DenseLayers, Windows, always, from_layer
from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import Json, Key, Setting, flag, whole_number
from sppo.config.huggingface.tensor_names import ROTARY_MODULES, TensorNames

_NAMES = TensorNames(modules=ROTARY_MODULES)
_DEFAULTS: Json = {
    **DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DENSE = (*rotary(), Windows(from_layer, switch=True, first=True), Rope())

QWEN2 = HfFamily(
    architecture="Qwen2ForCausalLM",
    settings=_DENSE,
    defaults=_DEFAULTS,
    fixed={"qkv_bias": True},
    tensors=_NAMES,
    refused=DENSE_REFUSED,
)
QWEN3 = HfFamily(
    architecture="Qwen3ForCausalLM",
    settings=(*_DENSE, *BIASES),
    defaults={**_DEFAULTS, "head_dim": 128},
    fixed={"qk_norm": "head"},
    tensors=_NAMES,
    refused=DENSE_REFUSED,
)


def _alternating(config: Json, layer: int) -> bool:
    """Return whether a layer of Qwen2-MoE has the window: every other one of the first layers."""
    return layer % 2 == 0 and layer < whole_number(config, "max_window_layers")


_EXPERTS: tuple[Setting, ...] = (
    *routed("num_experts", "moe_intermediate_size"),
    DenseLayers(),
    Rope(),
)
_EXPERT_DEFAULTS: Json = {**_DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": False}

QWEN2_MOE = HfFamily(
    architecture="Qwen2MoeForCausalLM",
    settings=(
        *rotary(),
        *_EXPERTS,
        Key("qkv_bias", "qkv_bias", flag),
        SWITCHED_SIZE,
        Windows(_alternating, switch=True),
    ),
    defaults={**_EXPERT_DEFAULTS, "num_key_value_heads": 16, "qkv_bias": True},
    fixed={"experts.shared_switch": True},
    tensors=TensorNames(modules={**ROTARY_MODULES, **EXPERT_MODULES, **SWITCHED_MODULES}),
    refused=REFUSED,
)
QWEN3_MOE = HfFamily(
    architecture="Qwen3MoeForCausalLM",
    settings=(
        *rotary(),
        *_EXPERTS,
        *BIASES,
        Windows(always, by_layer=False, switch=True),
    ),
    defaults={**_EXPERT_DEFAULTS, "num_key_value_heads": 4},
    fixed={"qk_norm": "head"},
    tensors=TensorNames(modules={**ROTARY_MODULES, **EXPERT_MODULES}),
    refused=REFUSED,
    aliases={"num_local_experts": "num_experts"},
)
