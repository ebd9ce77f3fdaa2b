"""Qwen 2, 3 and 3.5, dense, with experts and with linear attention."""

from __future__ import annotations

from dataclasses import replace

from sppo.config.huggingface.families.common import (
    BIASES,
    DEFAULTS,
    EXPERT_MODULES,
    rotary,
    routed,
)
from sppo.config.huggingface.families.refused import DENSE_REFUSED, REFUSED
from sppo.config.huggingface.family import HfFamily
from sppo.config.huggingface.layer_patterns import (
    DenseLayers,
    LinearLayers,
    Windows,
    always,
    from_layer,
)
from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import Json, Key, Setting, flag, integer, whole_number
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
)
_EXPERT_DEFAULTS: Json = {**_DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": False}

_SHARED_SIZE = Key("experts.shared_mlp_size", "shared_expert_intermediate_size", integer)
_SHARED_MODULES = {
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_switch": "mlp.shared_expert_gate",
}

QWEN2_MOE = HfFamily(
    architecture="Qwen2MoeForCausalLM",
    settings=(
        *rotary(),
        *_EXPERTS,
        Key("qkv_bias", "qkv_bias", flag),
        _SHARED_SIZE,
        Windows(_alternating, switch=True),
        Rope(),
    ),
    defaults={**_EXPERT_DEFAULTS, "num_key_value_heads": 16, "qkv_bias": True},
    fixed={"experts.shared_switch": True},
    tensors=TensorNames(modules={**ROTARY_MODULES, **EXPERT_MODULES, **_SHARED_MODULES}),
    refused=REFUSED,
)
QWEN3_MOE = HfFamily(
    architecture="Qwen3MoeForCausalLM",
    settings=(
        *rotary(),
        *_EXPERTS,
        *BIASES,
        Windows(always, by_layer=False, switch=True),
        Rope(),
    ),
    defaults={**_EXPERT_DEFAULTS, "num_key_value_heads": 4},
    fixed={"qk_norm": "head"},
    tensors=TensorNames(modules={**ROTARY_MODULES, **EXPERT_MODULES}),
    refused=REFUSED,
    aliases={"num_local_experts": "num_experts"},
)

_HYBRID: tuple[Setting, ...] = (
    *BIASES,
    LinearLayers(),
    Key("linear_attention.key_heads", "linear_num_key_heads", integer),
    Key("linear_attention.value_heads", "linear_num_value_heads", integer),
    Key("linear_attention.key_size", "linear_key_head_dim", integer),
    Key("linear_attention.value_size", "linear_value_head_dim", integer),
    Key("linear_attention.conv_size", "linear_conv_kernel_dim", integer),
    Rope(fraction=0.25),
)
_HYBRID_DEFAULTS: Json = {
    **DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}
_HYBRID_FIXED = {"norm_offset": True, "qk_norm": "head", "attention_gate": True}
_CONVOLUTIONS = ("conv_q", "conv_k", "conv_v")
_QKV = ("linear_q", "linear_k", "linear_v")
_HYBRID_NAMES = TensorNames(
    modules={
        **ROTARY_MODULES,
        "attention_gate": ROTARY_MODULES["q"],
        **dict.fromkeys(_QKV, "linear_attn.in_proj_qkv"),
        "linear_gate": "linear_attn.in_proj_z",
        "linear_beta": "linear_attn.in_proj_b",
        "linear_decay": "linear_attn.in_proj_a",
        **dict.fromkeys(_CONVOLUTIONS, "linear_attn.conv1d"),
        "decay.log_rate": "linear_attn.A_log",
        "decay.bias": "linear_attn.dt_bias",
        "linear_norm": "linear_attn.norm",
        "linear_o": "linear_attn.out_proj",
    },
    depthwise=frozenset(_CONVOLUTIONS),
    # q_proj has the queries of a head, then its gate.
    groups=dict.fromkeys(("q", "attention_gate"), "num_heads"),
    fp32=frozenset({"decay.log_rate", "linear_norm.weight"}),
    skipped=r"^(visual|mtp)\.",
)
QWEN3_5 = HfFamily(
    architecture="Qwen3_5ForCausalLM",
    settings=(*rotary(), *_HYBRID),
    defaults={**_HYBRID_DEFAULTS, "num_key_value_heads": 4},
    fixed=_HYBRID_FIXED,
    tensors=_HYBRID_NAMES,
    refused=DENSE_REFUSED,
    no_layers=("mtp_num_hidden_layers",),
    skipped=("vision_config",),
    nested_in="qwen3_5",
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    settings=(
        *rotary(mlp_size=False),
        Key("mlp_size", "moe_intermediate_size", integer),
        *routed("num_experts", "moe_intermediate_size")[:-1],
        _SHARED_SIZE,
        *_HYBRID,
    ),
    defaults={**_HYBRID_DEFAULTS, "num_experts_per_tok": 8},
    fixed={**_HYBRID_FIXED, "experts.shared_switch": True, "experts.normalize": True},
    tensors=replace(
        _HYBRID_NAMES,
        modules={
            **_HYBRID_NAMES.modules,
            **_SHARED_MODULES,
            "router": "mlp.gate",
            **dict.fromkeys(("expert_gate.weight", "expert_up.weight"), "mlp.experts.gate_up_proj"),
            "expert_down.weight": "mlp.experts.down_proj",
        },
        others=EXPERT_MODULES,
    ),
    refused=REFUSED,
    nested_in="qwen3_5_moe",
)
_QKVZ, _BA = (*_QKV, "linear_gate"), ("linear_beta", "linear_decay")
QWEN3_NEXT = HfFamily(
    architecture="Qwen3NextForCausalLM",
    settings=(*rotary(), *_EXPERTS, _SHARED_SIZE, *_HYBRID),
    defaults={
        **_HYBRID_DEFAULTS,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    fixed={**_HYBRID_FIXED, "experts.shared_switch": True},
    tensors=replace(
        _HYBRID_NAMES,
        modules={
            **_HYBRID_NAMES.modules,
            **EXPERT_MODULES,
            **_SHARED_MODULES,
            **dict.fromkeys(_QKVZ, "linear_attn.in_proj_qkvz"),
            **dict.fromkeys(_BA, "linear_attn.in_proj_ba"),
        },
        groups={
            **_HYBRID_NAMES.groups,
            **dict.fromkeys((*_QKVZ, *_BA), "linear_attention.key_heads"),
        },
    ),
    refused=REFUSED,
)
