"""Families of Hugging Face models: one record each of what their ``config.json`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import (
    Choice,
    Json,
    Key,
    Windows,
    flag,
    integer,
    number,
)
from sppo.config.model import Family, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFamily:
    """Record of a family."""

    architecture: str
    """Class of transformers."""
    settings: tuple[Key | Choice | Windows | Rope, ...]
    """Keys of a ``config.json`` and the model fields that they determine."""
    defaults: Json
    """Values of keys that a ``config.json`` leaves out. Sizes have no default."""
    fixed: Mapping[str, object]
    """Model fields that are equal in all models of the family, whatever their files say."""
    requires: Mapping[str, Callable[[ModelConfig], bool]]
    """Further rules that models of the family obey, by their text."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys by their other names."""
    no_dropout: tuple[str, ...] = ("attention_dropout",)
    """Keys that are written as 0, since models were trained without dropout."""

    def misfits(self, model: ModelConfig) -> Iterator[str]:
        """Yield the reasons why the family does not compute exactly `model`."""
        supported = {name: [value] for name, value in self.fixed.items()}
        for setting in self.settings:
            if isinstance(setting, Choice):
                supported[setting.field] = list(dict.fromkeys(setting.words.values()))
        for name, values in supported.items():
            value = getattr(model, name)
            if value not in values:
                yield f"{name} is {_word(value)}, needs {' or '.join(map(_word, values))}"
        for rule, obeys in self.requires.items():
            if not obeys(model):
                yield f"needs {rule}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _init_std(config: Json, key: str) -> float:
    """Return the deviation of random initial weights, which must not be all zero."""
    return number(config, key) or 0.02


def _num_heads(config: Json) -> int:
    return integer(config, "num_attention_heads")


def _head_size(config: Json) -> int:
    hidden, heads = integer(config, "hidden_size"), _num_heads(config)
    if hidden % heads:
        raise ValueError(
            f"config.json has hidden_size {hidden}, not a multiple of num_attention_heads {heads}, "
            "and no head_dim"
        )
    return hidden // heads


_COMMON = (
    Key("vocab_size", "vocab_size", integer),
    Key("init_std", "initializer_range", _init_std),
    Key("tie_embeddings", "tie_word_embeddings", flag),
)
_ROTARY = (
    *_COMMON,
    Key("hidden_size", "hidden_size", integer),
    Key("num_layers", "num_hidden_layers", integer),
    Key("num_heads", "num_attention_heads", integer),
    Key("num_kv_heads", "num_key_value_heads", integer, if_null=_num_heads),
    Key("head_size", "head_dim", integer, if_null=_head_size),
    Key("mlp_size", "intermediate_size", integer),
    Choice("mlp", "hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
    Key("norm_eps", "rms_norm_eps", number),
    Key("max_positions", "max_position_embeddings", integer),
    Rope(),
)
_BIASES = (Key("qkv_bias", "attention_bias", flag), Key("output_bias", "attention_bias", flag))
_GPT2 = (
    *_COMMON,
    Key("hidden_size", "n_embd", integer),
    Key("num_layers", "n_layer", integer),
    Key("num_heads", "n_head", integer),
    Key("mlp_size", "n_inner", integer, if_null=lambda config: 4 * integer(config, "n_embd")),
    Choice(
        "mlp",
        "activation_function",
        {
            "gelu": "gelu",
            "gelu_python": "gelu",
            "gelu_new": "gelu_tanh",
            "gelu_fast": "gelu_tanh",
            "gelu_pytorch_tanh": "gelu_tanh",
        },
    ),
    Key("norm_eps", "layer_norm_epsilon", number),
    Key("max_positions", "n_positions", integer, also="n_ctx"),
)

_ROTARY_FIXED = {"norm": "rmsnorm", "position": "rotary", "qk_norm": None}
_ROTARY_DEFAULTS: Json = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_QWEN_DEFAULTS: Json = {
    **_ROTARY_DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _num_windows(model: ModelConfig) -> int:
    return sum(model.layer_type(layer).window is not None for layer in range(model.num_layers))


_NO_WINDOWS = {"no layer with a sliding_window": lambda model: _num_windows(model) == 0}
_EQUAL_BIASES = {"qkv_bias equal to output_bias": lambda model: model.qkv_bias == model.output_bias}

FAMILIES: Mapping[Family, HfFamily] = {
    "llama": HfFamily(
        architecture="LlamaForCausalLM",
        settings=(*_ROTARY, *_BIASES, Key("mlp_bias", "mlp_bias", flag), Windows("never")),
        defaults={**_ROTARY_DEFAULTS, "max_position_embeddings": 2048},
        fixed=_ROTARY_FIXED,
        requires={
            **_EQUAL_BIASES,
            **_NO_WINDOWS,
            # LlamaConfig checks this even if head_dim is given.
            "hidden_size a multiple of num_heads": lambda m: m.hidden_size % m.num_heads == 0,
        },
    ),
    "qwen2": HfFamily(
        architecture="Qwen2ForCausalLM",
        settings=(*_ROTARY, Windows("in last layers")),
        defaults=_QWEN_DEFAULTS,
        fixed={**_ROTARY_FIXED, "qkv_bias": True, "output_bias": False, "mlp_bias": False},
        requires={},
    ),
    "qwen3": HfFamily(
        architecture="Qwen3ForCausalLM",
        settings=(*_ROTARY, *_BIASES, Windows("in last layers")),
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        fixed={**_ROTARY_FIXED, "qk_norm": "head", "mlp_bias": False},
        requires=_EQUAL_BIASES,
    ),
    "mistral": HfFamily(
        architecture="MistralForCausalLM",
        settings=(*_ROTARY, Windows("always")),
        defaults={
            **_ROTARY_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        fixed={**_ROTARY_FIXED, "qkv_bias": False, "output_bias": False, "mlp_bias": False},
        requires={
            "a sliding_window in all layers or in none": lambda m: (
                _num_windows(m) in (0, m.num_layers)
            )
        },
    ),
    "gpt2": HfFamily(
        architecture="GPT2LMHeadModel",
        settings=_GPT2,
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
        },
        fixed={
            "norm": "layernorm",
            "position": "learned",
            "qk_norm": None,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
        },
        requires={
            **_NO_WINDOWS,
            "num_kv_heads equal to num_heads": lambda m: m.kv_heads == m.num_heads,
            "hidden_size equal to num_heads * head_size": lambda m: (
                m.hidden_size == m.num_heads * m.head_dim
            ),
        },
        aliases={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "n_ctx": "n_positions",
        },
        no_dropout=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    ),
}
"""Families by name, in the order in which one is chosen for a model without a family."""
