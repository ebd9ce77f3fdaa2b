"""Families with experts: Mixtral, OLMoE, gpt-oss, GLM-4.5."""

from __future__ import annotations

from sppo.config.huggingface.families.common import (
    BIASES,
    DEFAULTS,
    EXPERT_MODULES,
    QKV_BIAS,
    head_size,
    rotary,
    routed,
)
from sppo.config.huggingface.families.refused import REFUSED
from sppo.config.huggingface.family import HfFamily
from sppo.config.huggingface.layer_patterns import Windows, all_but_every, always, never
from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import (
    Derived,
    Json,
    Key,
    flag,
    integer,
    number,
    whole_number,
)
from sppo.config.huggingface.tensor_names import EXPERT, ROTARY_MODULES, TensorNames
from sppo.config.model import ModelConfig

MIXTRAL = HfFamily(
    architecture="MixtralForCausalLM",
    settings=(
        *rotary(),
        *routed("num_local_experts", "intermediate_size")[:-1],
        Windows(always, by_layer=False),
        Rope(theta=1e6),
    ),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    fixed={"experts.normalize": True},
    tensors=TensorNames(
        modules={
            **ROTARY_MODULES,
            "router": "block_sparse_moe.gate",
            "expert_gate": f"block_sparse_moe.experts.{EXPERT}.w1",
            "expert_up": f"block_sparse_moe.experts.{EXPERT}.w3",
            "expert_down": f"block_sparse_moe.experts.{EXPERT}.w2",
        }
    ),
    refused={**REFUSED, "router_jitter_noise": ((0,), "0, routing without noise")},
    aliases={"num_experts": "num_local_experts"},
)
OLMOE = HfFamily(
    architecture="OlmoeForCausalLM",
    settings=(
        *rotary(),
        Derived("head_size", head_size),
        *BIASES,
        *routed("num_experts", "intermediate_size"),
        Windows(never),
        Rope(),
    ),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    fixed={"qk_norm": "all"},
    tensors=TensorNames(modules={**ROTARY_MODULES, **EXPERT_MODULES}),
    refused={**REFUSED, "clip_qkv": ((), "null, queries, keys and values as they are")},
    aliases={"num_local_experts": "num_experts"},
)
_GPT_OSS_YARN: Json = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = HfFamily(
    architecture="GptOssForCausalLM",
    settings=(
        *rotary(words={"silu": "swiglu_clamped"}),
        *BIASES,
        *routed("num_local_experts", "intermediate_size")[:-1],
        Windows(all_but_every(2)),
        Rope(theta=150_000.0, unnamed=_GPT_OSS_YARN),
    ),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
    },
    fixed={
        "attention_sinks": True,
        "experts.score": "softmax_chosen",
        "experts.bias": True,
        "experts.router_bias": True,
    },
    tensors=TensorNames(
        modules={
            **ROTARY_MODULES,
            "sinks.weight": "self_attn.sinks",
            "router": "mlp.router",
            **dict.fromkeys(("expert_gate.weight", "expert_up.weight"), "mlp.experts.gate_up_proj"),
            **dict.fromkeys(
                ("expert_gate.bias", "expert_up.bias"), "mlp.experts.gate_up_proj_bias"
            ),
            "expert_down.weight": "mlp.experts.down_proj",
            "expert_down.bias": "mlp.experts.down_proj_bias",
        },
        transposed=frozenset({"expert_gate", "expert_up", "expert_down"}),
        groups=dict.fromkeys(("expert_gate", "expert_up"), "experts.mlp_size"),
    ),
    refused={
        **REFUSED,
        "quantization_config": (
            (),
            "null, plain weights; load MXFP4 files with transformers' "
            "Mxfp4Config(dequantize=True), and save the model in bf16",
        ),
        "swiglu_alpha": ((1.702,), "1.702"),
        "swiglu_limit": ((7.0,), "7.0"),
    },
    aliases={"num_experts": "num_local_experts"},
)


def _shared_size(config: Json, key: str) -> int:
    """Return the width of the shared MLP: that of some experts."""
    return whole_number(config, key) * integer(config, "moe_intermediate_size")


def _num_shared(model: ModelConfig) -> int | None:
    experts = model.experts
    return None if experts is None else experts.shared_mlp_size // experts.mlp_size


GLM4_MOE = HfFamily(
    architecture="Glm4MoeForCausalLM",
    settings=(
        *rotary(),
        QKV_BIAS,
        Key(
            "qk_norm",
            "use_qk_norm",
            lambda config, key: "head" if flag(config, key) else None,
            form=lambda model: model.qk_norm is not None,
        ),
        *routed("n_routed_experts", "moe_intermediate_size"),
        Key("experts.shared_mlp_size", "n_shared_experts", _shared_size, form=_num_shared),
        Key("experts.scale", "routed_scaling_factor", number),
        Key("experts.groups", "n_group", integer),
        Key("experts.groups_per_token", "topk_group", integer),
        Key("experts.dense_layers", "first_k_dense_replace", whole_number),
        Windows(never),
        Rope(fraction=0.5),
    ),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    fixed={"experts.score": "sigmoid", "experts.choice_bias": True},
    tensors=TensorNames(
        modules={
            **ROTARY_MODULES,
            **EXPERT_MODULES,
            "router.choice_bias": "mlp.gate.e_score_correction_bias",
            "shared_gate": "mlp.shared_experts.gate_proj",
            "shared_up": "mlp.shared_experts.up_proj",
            "shared_down": "mlp.shared_experts.down_proj",
        },
        fp32=frozenset({"router.weight", "router.choice_bias"}),
        has_later_layers=True,
    ),
    refused=REFUSED,
    aliases={"num_local_experts": "n_routed_experts"},
    no_layers=("num_nextn_predict_layers",),
)
