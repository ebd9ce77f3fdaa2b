"""Conversion of model fields to a Hugging Face ``config.json`` of a family that matches exactly."""

from __future__ import annotations

from typing import Any, get_args

from sppo.config.huggingface_rope import write_rope
from sppo.config.model import Family, ModelConfig

_FAMILIES: tuple[Family, ...] = get_args(Family)

_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}

_ROTARY: dict[str, tuple[object, ...]] = {
    "mlp": ("swiglu",),
    "norm": ("rmsnorm",),
    "position": ("rotary",),
}
_HOLDS: dict[Family, dict[str, tuple[object, ...]]] = {
    "llama": {
        **_ROTARY,
        "qk_norm": (False,),
        "(qkv_bias, output_bias)": ((False, False), (True, True)),
        "layers with a sliding_window": ("none",),
        # LlamaConfig checks this even if head_dim is given.
        "hidden_size a multiple of num_heads": (True,),
    },
    "qwen2": {
        **_ROTARY,
        "qk_norm": (False,),
        "(qkv_bias, output_bias)": ((True, False),),
        "mlp_bias": (False,),
    },
    "qwen3": {
        **_ROTARY,
        "qk_norm": (True,),
        "(qkv_bias, output_bias)": ((False, False), (True, True)),
        "mlp_bias": (False,),
    },
    "mistral": {
        **_ROTARY,
        "qk_norm": (False,),
        "(qkv_bias, output_bias)": ((False, False),),
        "mlp_bias": (False,),
        "layers with a sliding_window": ("none", "all"),
    },
    "gpt2": {
        "mlp": ("gelu", "gelu_tanh"),
        "norm": ("layernorm",),
        "position": ("learned",),
        "qk_norm": (False,),
        "(qkv_bias, output_bias)": ((True, True),),
        "mlp_bias": (True,),
        "layers with a sliding_window": ("none",),
        "num_kv_heads equal to num_heads": (True,),
        "hidden_size equal to num_heads * head_size": (True,),
    },
}
"""Values of features that each family supports; a feature that is not listed may have any value."""


def hf_config(model: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of `model`.

    Special token ids are null, because a model shape does not know its tokenizer. Without these
    keys each family would assume default ids.

    Args:
        model: Shape of the model; ``model.family`` is used if set, else the first family that
            matches.
        dtype: Type of the weights: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.

    Raises:
        ValueError: No family, or not the requested one, computes exactly this model.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    family = hf_family(model)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        # The older spelling of `dtype`, which every version reads.
        "torch_dtype": _DTYPES[dtype],
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "gpt2":
        return config | _gpt2(model)
    return config | _rotary(model, family) | write_rope(model)


def hf_family(model: ModelConfig) -> Family:
    """Return the family under which ``hf_config`` writes `model`.

    Raises:
        ValueError: No family, or not ``model.family``, computes exactly this model.
    """
    candidates = _FAMILIES if model.family is None else (model.family,)
    misfits = {family: family_misfits(model, family) for family in candidates}
    for family, reasons in misfits.items():
        if not reasons:
            return family
    lines = [f"  {family}: {'; '.join(reasons)}" for family, reasons in misfits.items()]
    head = "no Hugging Face family computes exactly this model:"
    if model.family is not None:
        head = f"{model.family} does not compute this model; use another family or null:"
    raise ValueError("\n".join([head, *lines]))


def family_misfits(model: ModelConfig, family: Family) -> list[str]:
    """Return the reasons why `family` does not compute exactly `model`; empty if it does."""
    features = _features(model)
    return [
        f"{name} is {_word(features[name])}, needs {' or '.join(map(_word, allowed))}"
        for name, allowed in _HOLDS[family].items()
        if features[name] not in allowed
    ]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, (bool, tuple)) else str(value)


def _features(model: ModelConfig) -> dict[str, object]:
    windowed = sum(model.window_of(layer) is not None for layer in range(model.num_layers))
    extent = {0: "none", model.num_layers: "all"}.get(windowed, "some")
    return {
        "mlp": model.mlp,
        "norm": model.norm,
        "position": model.position,
        "qk_norm": model.qk_norm,
        "(qkv_bias, output_bias)": (model.qkv_bias, model.output_bias),
        "mlp_bias": model.mlp_bias,
        "layers with a sliding_window": extent,
        "num_kv_heads equal to num_heads": model.kv_heads == model.num_heads,
        "hidden_size equal to num_heads * head_size": _plain_heads(model),
        "hidden_size a multiple of num_heads": model.hidden_size % model.num_heads == 0,
    }


def _plain_heads(model: ModelConfig) -> bool:
    return model.hidden_size == model.num_heads * model.head_dim


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.mlp_size,
        "n_positions": model.max_positions,
        "n_ctx": model.max_positions,
        "activation_function": _ACTIVATIONS[model.mlp],
        "layer_norm_epsilon": model.norm_eps,
        # The default of GPT-2 is 10 % dropout; this model was trained without dropout.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _rotary(model: ModelConfig, family: Family) -> dict[str, Any]:
    config: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.mlp_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
    }
    if model.max_positions is not None:
        config["max_position_embeddings"] = model.max_positions
    # Published Qwen2 files have no head_dim, and not every program reads one there.
    if family != "qwen2" or not _plain_heads(model):
        config["head_dim"] = model.head_dim
    if family in ("llama", "qwen3"):
        config["attention_bias"] = model.output_bias
    if family == "llama":
        config["mlp_bias"] = model.mlp_bias
    if family in ("qwen2", "qwen3"):
        config |= _qwen_window(model)
    if family == "mistral":
        config["sliding_window"] = model.sliding_window if model.window_of(0) else None
    return config


def _qwen_window(model: ModelConfig) -> dict[str, Any]:
    windowed = model.window_of(model.num_layers - 1) is not None
    return {
        "use_sliding_window": windowed,
        "sliding_window": model.sliding_window if windowed else None,
        "max_window_layers": model.sliding_window_first_layer if windowed else model.num_layers,
    }
