"""Dense families that normalize the outputs of attention and MLP: OLMo, EXAONE, Gemma, GLM."""

from __future__ import annotations

from sppo.config.huggingface.families.common import BIASES, DEFAULTS, QKV_BIAS, rotary
from sppo.config.huggingface.families.refused import DENSE_REFUSED
from sppo.config.huggingface.family import HfFamily
from sppo.config.huggingface.layer_patterns import Windows, all_but_every, never
from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import Derived, Json, Key, integer, positive, score_scale
from sppo.config.huggingface.tensor_names import ROTARY_MODULES, TensorNames
from sppo.config.model import ModelConfig

_POST_NAMES = TensorNames(
    modules={
        **ROTARY_MODULES,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
_OLMO_DEFAULTS: Json = {**DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}

OLMO2 = HfFamily(
    architecture="Olmo2ForCausalLM",
    settings=(*rotary(), *BIASES, Windows(never), Rope()),
    defaults=_OLMO_DEFAULTS,
    fixed={"norm_placement": "post", "qk_norm": "all"},
    tensors=_POST_NAMES,
    refused=DENSE_REFUSED,
)
OLMO3 = HfFamily(
    architecture="Olmo3ForCausalLM",
    settings=(
        *rotary(),
        *BIASES,
        Windows(all_but_every(4)),
        Rope(theta=5e5, sliding_theta=5e5),
    ),
    defaults={**_OLMO_DEFAULTS, "sliding_window": 4096},
    fixed={"norm_placement": "post", "qk_norm": "all"},
    tensors=_POST_NAMES,
    refused=DENSE_REFUSED,
)

_EXAONE_WINDOWS = Windows(all_but_every(4, key="sliding_window_pattern"))


def _rotated_of_exaone(config: Json) -> list[bool] | None:
    """Return which layers rotate q and k: those with a window, or all if there is none."""
    if config.get("sliding_window") is None:
        return None
    fields = _EXAONE_WINDOWS.read(config)
    types = fields["layer_types"] or ["full" if fields["sliding_window"] is None else "sliding"]
    rotated = [kind == "sliding" for kind in types]
    return None if all(rotated) else rotated


EXAONE4 = HfFamily(
    architecture="Exaone4ForCausalLM",
    settings=(
        *rotary(),
        _EXAONE_WINDOWS,
        Derived("rotary_layers", _rotated_of_exaone),
        Rope(),
    ),
    defaults={
        **_OLMO_DEFAULTS,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    fixed={"norm_placement": "post", "qk_norm": "head"},
    tensors=_POST_NAMES,
    refused=DENSE_REFUSED,
)


def _scale_of_gemma(config: Json, key: str) -> float | None:
    """Return the factor of scores, null for the usual one."""
    scalar = positive(config, key)
    return None if scalar == integer(config, "head_dim") else scalar**-0.5


def _query_scalar(model: ModelConfig) -> int:
    return round(score_scale(model) ** -2)


GEMMA3 = HfFamily(
    architecture="Gemma3ForCausalLM",
    settings=(
        *rotary(activation="hidden_activation", words={"gelu_pytorch_tanh": "geglu_tanh"}),
        *BIASES,
        Key("attention_scale", "query_pre_attn_scalar", _scale_of_gemma, form=_query_scalar),
        Derived("embedding_scale", lambda config: integer(config, "hidden_size") ** 0.5),
        Windows(all_but_every(6, key="sliding_window_pattern")),
        Rope(theta=1e6, sliding_theta=1e4, sliding_key="rope_local_base_freq"),
    ),
    defaults={
        **DEFAULTS,
        # Published files of models with a vision tower leave these sizes out.
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    fixed={"norm_placement": "both", "norm_offset": True, "qk_norm": "head"},
    tensors=TensorNames(
        modules={
            **ROTARY_MODULES,
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
        skipped=r"^(vision_tower|multi_modal_projector)\.",
    ),
    refused={
        **DENSE_REFUSED,
        "final_logit_softcapping": ((), "null, logits without a soft cap"),
        "attn_logit_softcapping": ((), "null, scores without a soft cap"),
        "use_bidirectional_attention": ((False,), "false, causal attention"),
    },
    skipped=("vision_config",),
    nested_in="gemma3",
)
GLM4 = HfFamily(
    architecture="Glm4ForCausalLM",
    settings=(*rotary(), QKV_BIAS, Windows(never), Rope(fraction=0.5)),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131072,
        "attention_bias": True,
    },
    fixed={"norm_placement": "both"},
    tensors=TensorNames(
        modules={
            **ROTARY_MODULES,
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
            **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
        },
        adjacent_pairs=True,
    ),
    refused=DENSE_REFUSED,
)
