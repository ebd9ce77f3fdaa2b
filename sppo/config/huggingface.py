"""Conversion of a Hugging Face ``config.json`` to model fields; reads neither weights nor network.

Dropout is accepted and not applied: SPPO trains without dropout. Every other setting that changes
the function of a model and is not supported is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

from sppo.config.huggingface_export import hf_config
from sppo.config.huggingface_rope import read_rope
from sppo.config.huggingface_values import Json, flag, integer, number, refusal, require
from sppo.config.json_file import read_json
from sppo.config.model import Family
from sppo.quoting import quoted

__all__ = ["hf_config", "ignored_settings", "model_fields", "read_config", "read_model_fields"]

_FAMILIES: tuple[Family, ...] = get_args(Family)

_ROTARY_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_QWEN_DEFAULTS: dict[str, Any] = {
    **_ROTARY_DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {**_ROTARY_DEFAULTS, "max_position_embeddings": 2048},
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": {**_QWEN_DEFAULTS, "head_dim": 128},
    "mistral": {
        **_ROTARY_DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
}
"""Values of keys that a ``config.json`` leaves out, by family. Sizes have no default."""

_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "n_ctx": "n_positions",
}
"""Alternative names of GPT-2's sizes, and the names that GPT-2 uses itself."""

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_GELUS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_OFF: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("quantization_config", (), "null, plain weights"),
    ("num_experts", (0,), "null, dense models"),
    ("num_local_experts", (0,), "null, dense models"),
    ("n_routed_experts", (0,), "null, dense models"),
    ("is_encoder_decoder", (False,), "false, decoder-only models"),
    ("add_cross_attention", (False,), "false, decoder-only models"),
    ("is_causal", (True,), "true, causal attention"),
    ("pruned_heads", ({}, []), "null, all heads"),
    ("scale_attn_weights", (True,), "true, scores divided by the root of the head size"),
    ("scale_attn_by_inverse_layer_idx", (False,), "false"),
)
"""Keys that must be absent, null, or have one of the given values; the text names what is
supported."""

_DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")


def read_model_fields(directory: Path) -> dict[str, Any]:
    """Return the fields of :class:`sppo.config.model.ModelConfig` in ``directory/config.json``.

    Raises:
        ValueError: There is no such file, or its family or a feature is not supported.
    """
    return model_fields(read_config(directory))


def read_config(directory: Path) -> dict[str, Any]:
    """Return the mapping in ``directory/config.json``.

    Raises:
        ValueError: The directory or file does not exist, cannot be read, or is not a JSON mapping.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory; name a local one in the Hugging Face layout, "
            "nothing is downloaded"
        )
    path = directory / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{directory} holds no config.json") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {type(config).__name__}, not a mapping of settings")
    return config


def model_fields(config: Json) -> dict[str, Any]:
    """Return the fields of :class:`sppo.config.model.ModelConfig` in a parsed ``config.json``.

    Raises:
        ValueError: The family or a feature is not supported.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise refusal("model_type", family, ", ".join(_FAMILIES))
    known = cast(Family, family)
    faults = [
        f"{key} {quoted(config[key])} (supported: {supported})"
        for key, allowed, supported in _OFF
        if config.get(key) is not None and config[key] not in allowed
    ]
    if faults:
        raise ValueError("config.json has " + "; ".join(faults))
    values = {**_DEFAULTS[known], **config}
    common = {
        "family": known,
        "tie_embeddings": flag(values, "tie_word_embeddings"),
        # Used for random initial weights alone, which must not be all zero.
        "init_std": number(values, "initializer_range") or 0.02,
    }
    read = _read_gpt2 if known == "gpt2" else _read_rotary
    return {**common, **read(values)}


def ignored_settings(config: Json) -> tuple[str, ...]:
    """Return the settings in a ``config.json`` that training ignores, as ``key value`` texts."""
    return tuple(f"{key} {quoted(config[key])}" for key in _DROPOUTS if config.get(key))


def _read_rotary(values: Json) -> dict[str, Any]:
    """Return the fields of a Llama, Qwen2, Qwen3 or Mistral: RMSNorm, rotary positions, SwiGLU."""
    require(values, (*_SIZES, "intermediate_size"))
    if values["hidden_act"] not in ("silu", "swish"):
        raise refusal("hidden_act", values["hidden_act"], "silu")
    family, heads = values["model_type"], integer(values, "num_attention_heads")
    # Mistral has no biases and Qwen2 always has three, whatever their files say.
    bias = family in ("llama", "qwen3") and flag(values, "attention_bias")
    grouped = values.get("num_key_value_heads") is not None
    return {
        "vocab_size": integer(values, "vocab_size"),
        "hidden_size": integer(values, "hidden_size"),
        "num_layers": integer(values, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": integer(values, "num_key_value_heads") if grouped else heads,
        "head_size": _head_size(values),
        "mlp_size": integer(values, "intermediate_size"),
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "norm_eps": number(values, "rms_norm_eps"),
        "position": "rotary",
        "max_positions": integer(values, "max_position_embeddings"),
        "qk_norm": family == "qwen3",
        "qkv_bias": bias or family == "qwen2",
        "output_bias": bias,
        "mlp_bias": family == "llama" and flag(values, "mlp_bias"),
        **read_rope(values),
        **_read_window(values),
    }


def _head_size(values: Json) -> int:
    if values.get("head_dim") is not None:
        return integer(values, "head_dim")
    hidden, heads = integer(values, "hidden_size"), integer(values, "num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"config.json has hidden_size {hidden}, not a multiple of num_attention_heads "
            f"{heads}, and no head_dim"
        )
    return hidden // heads


def _read_window(values: Json) -> dict[str, Any]:
    """Return the sliding window and the first layer that uses it."""
    family, layers = values["model_type"], integer(values, "num_hidden_layers")
    window = values.get("sliding_window")
    if family == "llama" or (family != "mistral" and not flag(values, "use_sliding_window")):
        window = None
    if window is None:
        first = layers
    else:
        integer(values, "sliding_window")
        first = 0 if family == "mistral" else _first_window_layer(values)
    kinds = values.get("layer_types")
    if kinds is not None:
        first = _first_sliding(kinds, layers=layers, windowed=window is not None)
        if family == "mistral" and window is not None and first > 0:
            raise refusal("layer_types", kinds, "sliding_attention everywhere in mistral")
    if first >= layers:
        return {"sliding_window": None, "sliding_window_first_layer": 0}
    return {"sliding_window": window, "sliding_window_first_layer": first}


def _first_window_layer(values: Json) -> int:
    first = values.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise refusal("max_window_layers", first, "a whole number of at least 0")
    return first


def _first_sliding(kinds: object, *, layers: int, windowed: bool) -> int:
    """Return the index of the first sliding-attention layer; `layers` if there is none."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise refusal("layer_types", kinds, f"one entry for each of {layers} layers")
    first = next((i for i, kind in enumerate(kinds) if kind != "full_attention"), layers)
    if any(kind != "sliding_attention" for kind in kinds[first:]):
        raise refusal(
            "layer_types", kinds, "full_attention layers followed by sliding_attention layers"
        )
    if first < layers and not windowed:
        raise refusal("layer_types", kinds, "full_attention only, as no sliding_window is in use")
    return first


def _read_gpt2(raw: Json) -> dict[str, Any]:
    """Return the fields of a GPT-2: LayerNorm, learned positions, GELU, biases, no grouped K/V."""
    values = {_ALIASES.get(key, key): value for key, value in raw.items()}
    # GPT-2's own name of a size takes precedence over the alias.
    values |= {key: raw[key] for key in _ALIASES.values() if raw.get(key) is not None}
    require(values, ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"))
    activation = values["activation_function"]
    if not isinstance(activation, str) or activation not in _GELUS:
        raise refusal("activation_function", activation, ", ".join(_GELUS))
    hidden, heads = integer(values, "n_embd"), integer(values, "n_head")
    if hidden % heads:
        raise ValueError(f"config.json has n_embd {hidden}, not a multiple of n_head {heads}")
    is_default = values.get("n_inner") is None
    return {
        "vocab_size": integer(values, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": integer(values, "n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_size": hidden // heads,
        "mlp_size": 4 * hidden if is_default else integer(values, "n_inner"),
        "mlp": _GELUS[activation],
        "norm": "layernorm",
        "norm_eps": number(values, "layer_norm_epsilon"),
        "position": "learned",
        "max_positions": integer(values, "n_positions"),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    }
