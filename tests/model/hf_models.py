"""Tiny random transformers models of all families, as oracles for SPPO's models.

All weights are random: transformers initializes norms with one and biases with zero, which would
hide a forgotten norm or bias.
"""

import copy
import os

import torch

from sppo.config.huggingface.model_config import model_fields
from sppo.config.model import ModelConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Keys of a ``rope_scaling``."""

MROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": True}
"""Keys of positions in images, which are equal in texts."""

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e5,
    "original_max_position_embeddings": 64,
}

_ROTARY = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "max_position_embeddings": 256,
}
_SIX = {**_ROTARY, "num_hidden_layers": 6, "pad_token_id": None}
_LINEAR = {
    **{**_ROTARY, "num_hidden_layers": 8, "head_dim": 8, "pad_token_id": None},
    "rms_norm_eps": 0.1,
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_conv_kernel_dim": 4},
    **{"linear_num_value_heads": 4, "linear_value_head_dim": 10},
}
"""Six of eight layers have linear attention. Its first outputs are v times q k, which may be nearly
zero; without a large number under the root their norm blows up rounding."""
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
# Where a family lets them differ, hidden_size 24 is not num_attention_heads * head_dim = 60.
_TINY = {
    "llama": {**_ROTARY, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**_ROTARY, "rope_theta": 1e6},
    "qwen3": {**_ROTARY, "head_dim": 10, "tie_word_embeddings": True, "rope_theta": 1e6},
    "mistral": {**_ROTARY, "hidden_size": 26, "head_dim": 10, "sliding_window": 9},
    "gpt2": {
        "vocab_size": 61,
        "n_embd": 24,
        "n_layer": 3,
        "n_head": 3,
        "n_inner": 52,
        "n_positions": 256,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "ministral": {
        **{**_SIX, "head_dim": 10, "sliding_window": 9},
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "smollm3": {**_SIX, "attention_bias": True, "no_rope_layer_interval": 3},
    "seed_oss": {**_SIX, "head_dim": 10, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "phi3": {**_SIX, "hidden_size": 48, "partial_rotary_factor": 0.75, "sliding_window": 9},
    "granite": {
        **{**_SIX, "attention_multiplier": 0.3, "embedding_multiplier": 3.0},
        **{"residual_multiplier": 0.7, "logits_scaling": 0.3},
    },
    "arcee": {**_SIX, "head_dim": 10, "mlp_bias": True},
    "exaone4": {**_SIX, "sliding_window": 7, "sliding_window_pattern": 3, "head_dim": 10},
    "olmo2": {**_SIX, "attention_bias": True},
    "olmo3": {**_SIX, "sliding_window": 7, "rope_parameters": {"full_attention": YARN}},
    "gemma3_text": {
        **_SIX,
        "head_dim": 10,
        "query_pre_attn_scalar": 12,
        "sliding_window": 7,
        "sliding_window_pattern": 3,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
    },
    "glm4": {**_SIX, "head_dim": 8, "attention_bias": True},
    "mixtral": {**_SIX, **_EXPERTS, "num_local_experts": 5, "sliding_window": 9},
    "qwen2_moe": {**_SIX, **_EXPERTS, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**_SIX, **_EXPERTS, "head_dim": 10, "norm_topk_prob": True},
    "olmoe": {**_SIX, **_EXPERTS},
    "gpt_oss": {
        **{**_SIX, **_EXPERTS, "head_dim": 10, "num_local_experts": 5, "sliding_window": 9},
        "rope_parameters": {**YARN, "truncate": False},
    },
    "glm4_moe": {
        **{**_SIX, **_EXPERTS, "head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 2},
        **{"n_group": 3, "topk_group": 2, "first_k_dense_replace": 2, "num_mtp_layers": 0},
        **{"routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
    },
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 20},
    "qwen3_5_text": {
        **{**_LINEAR, "attention_bias": True, "linear_conv_kernel_dim": 3},
        "rope_parameters": {**MROPE, "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
    "qwen3_5_moe_text": {
        **{**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 20},
        **{"tie_word_embeddings": True, "full_attention_interval": 3},
    },
}
"""Six or eight layers, where some are different: each kind occurs twice. Windows are shorter than
tests."""

FAMILIES = tuple(_TINY)
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with linear attention."""
_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Implementations that also work in float64."""


def tiny_hf_model(family, *, seed=0, **options):
    """A random model in float32 and evaluation mode, and our description of it.

    Options are keys of the family's config.json; sizes of gpt2 may be spelt as the others' are.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM

    if family == "gpt2":
        options = {_SIZES.get(key, key): value for key, value in options.items()}
    values = {**_TINY[family], "bos_token_id": None, "eos_token_id": None, **options}
    values = copy.deepcopy(values)  # transformers writes into the mappings it is given
    config = AutoConfig.for_model(family, **values)
    model = AutoModelForCausalLM.from_config(config, **EAGER).eval()
    randomize(model, seed=seed)
    return model, ModelConfig.model_validate(model_fields(model.config.to_dict()))


@torch.no_grad()
def randomize(model, *, seed):
    """Factors of norms near one, everything else near zero and large enough to matter.

    Half of the heads with linear attention forget slowly, so that a lost state is seen, and their
    convolutions are as large as transformers initializes them.
    """
    offset = 1.0 if model.config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5")) else 0.0
    generator = torch.Generator().manual_seed(seed)
    biases = [one for one in model.named_buffers() if one[0].endswith("correction_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        noise = torch.randn(parameter.shape, generator=generator) * 0.15
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        one = 1.0 if name.endswith("linear_attn.norm.weight") else 1.0 - offset
        parameter.copy_(noise + one if is_norm else noise)
        if name.endswith(("A_log", "dt_bias")):
            parameter[::2] -= 1.5
        if name.endswith("conv1d.weight"):
            parameter *= 3


@torch.no_grad()
def log_probabilities(model, ids):
    """What a model of transformers says of each token after the first, ``[T - 1]``, in float64."""
    tokens = torch.as_tensor(ids)[None]
    logits = model(tokens[:, :-1]).logits[0].double().log_softmax(-1)
    return logits.gather(-1, tokens[0, 1:, None])[:, 0]
