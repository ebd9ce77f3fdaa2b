"""Families in which most layers have linear attention: Qwen3-Next, Qwen 3.5 and 3.6."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
from sppo.config.huggingface.layer_patterns import DenseLayers, LinearLayers
from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import Derived, Json, Setting, integer
from sppo.config.huggingface.tensor_names import ROTARY_MODULES, TensorNames

_LAYERS: tuple[Setting, ...] = (*BIASES, LinearLayers(), Rope(fraction=0.25))
_DEFAULTS: Json = {
    **DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_GATED = {"attn_output_gate": ((True,), "true, attention with a gate")}
_FIXED = {"norm_offset": True, "qk_norm": "head", "attention_gate": True}
_SWITCHED = {**_FIXED, "experts.shared_switch": True}

_CONVOLUTIONS = ("conv_q", "conv_k", "conv_v")
_MODULES = {
    **ROTARY_MODULES,
    "attention_gate": ROTARY_MODULES["q"],
    **dict.fromkeys(_CONVOLUTIONS, "linear_attn.conv1d"),
    "decay.log_rate": "linear_attn.A_log",
    "decay.bias": "linear_attn.dt_bias",
    "linear_norm": "linear_attn.norm",
    "linear_o": "linear_attn.out_proj",
}
_FUSED = {
    **dict.fromkeys(
        ("linear_q", "linear_k", "linear_v", "linear_gate"), "linear_attn.in_proj_qkvz"
    ),
    **dict.fromkeys(("linear_beta", "linear_decay"), "linear_attn.in_proj_ba"),
}
"""Projections of Qwen3-Next: two tensors with the shares of one key head after another."""
_APART = {
    **dict.fromkeys(("linear_q", "linear_k", "linear_v"), "linear_attn.in_proj_qkv"),
    "linear_gate": "linear_attn.in_proj_z",
    "linear_beta": "linear_attn.in_proj_b",
    "linear_decay": "linear_attn.in_proj_a",
}
_STACKED = {
    "router": "mlp.gate",
    **dict.fromkeys(("expert_gate.weight", "expert_up.weight"), "mlp.experts.gate_up_proj"),
    "expert_down.weight": "mlp.experts.down_proj",
}


def _tensors(
    modules: Mapping[str, str],
    *,
    groups: Mapping[str, str] = MappingProxyType({}),
    others: Mapping[str, str] = MappingProxyType({}),
) -> TensorNames:
    """Return the names of tensors, and their layouts, with those that all families have.

    For each head, q_proj has its queries, then its gate.
    """
    return TensorNames(
        modules={**_MODULES, **modules},
        others=others,
        groups={**dict.fromkeys(("q", "attention_gate"), "num_heads"), **groups},
        depthwise=frozenset(_CONVOLUTIONS),
        fp32=frozenset({"decay.log_rate", "linear_norm.weight"}),
        skipped=r"^(visual|mtp)\.",
    )


QWEN3_NEXT = HfFamily(
    architecture="Qwen3NextForCausalLM",
    settings=(
        *rotary(),
        *routed("num_experts", "moe_intermediate_size"),
        SWITCHED_SIZE,
        DenseLayers(),
        *_LAYERS,
    ),
    defaults={
        **_DEFAULTS,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    fixed=_SWITCHED,
    tensors=_tensors(
        {**_FUSED, **EXPERT_MODULES, **SWITCHED_MODULES},
        groups=dict.fromkeys(_FUSED, "linear_attention.key_heads"),
    ),
    refused={**REFUSED, **_GATED},
    aliases={"num_local_experts": "num_experts"},
)
QWEN3_5 = HfFamily(
    architecture="Qwen3_5ForCausalLM",
    settings=(*rotary(), *_LAYERS),
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    fixed=_FIXED,
    tensors=_tensors(_APART),
    refused={**DENSE_REFUSED, **_GATED},
    no_layers=("mtp_num_hidden_layers",),
    skipped=("vision_config",),
    nested_in="qwen3_5",
)
QWEN3_5_MOE = HfFamily(
    architecture="Qwen3_5MoeForCausalLM",
    settings=(
        *rotary(mlp_size=False),
        Derived("mlp_size", lambda config: integer(config, "moe_intermediate_size")),
        *routed("num_experts", "moe_intermediate_size")[:-1],
        SWITCHED_SIZE,
        *_LAYERS,
    ),
    defaults={**_DEFAULTS, "num_experts_per_tok": 8},
    fixed={**_SWITCHED, "experts.normalize": True},
    tensors=_tensors({**_APART, **_STACKED, **SWITCHED_MODULES}, others=EXPERT_MODULES),
    refused={**REFUSED, **_GATED},
    aliases={"num_local_experts": "num_experts"},
    no_layers=("mtp_num_hidden_layers",),
    skipped=("vision_config",),
    nested_in="qwen3_5_moe",
)
