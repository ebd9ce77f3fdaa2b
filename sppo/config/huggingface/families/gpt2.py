"""GPT-2."""

from __future__ import annotations

from sppo.config.huggingface.families.common import COMMON
from sppo.config.huggingface.families.refused import DENSE_REFUSED
from sppo.config.huggingface.family import HfFamily
from sppo.config.huggingface.settings import Choice, Key, integer, number
from sppo.config.huggingface.tensor_names import TensorNames

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

GPT2 = HfFamily(
    architecture="GPT2LMHeadModel",
    settings=(
        *COMMON,
        Key("hidden_size", "n_embd", integer),
        Key("num_layers", "n_layer", integer),
        Key("num_heads", "n_head", integer),
        Key("mlp_size", "n_inner", integer, if_null=lambda config: 4 * integer(config, "n_embd")),
        Choice("mlp", "activation_function", _ACTIVATIONS),
        Key("norm_eps", "layer_norm_epsilon", number),
        Key("max_positions", "n_positions", integer, also="n_ctx"),
    ),
    defaults={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    fixed={
        "norm": "layernorm",
        "position": "learned",
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
    },
    tensors=TensorNames(
        modules={
            "embed": "wte",
            "positions": "wpe",
            "attention_norm": "ln_1",
            "q": "attn.c_attn",
            "k": "attn.c_attn",
            "v": "attn.c_attn",
            "o": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
            "final_norm": "ln_f",
        },
        prefix="transformer.",
        layers="h",
        transposed=frozenset({"q", "k", "v", "o", "up", "down"}),
    ),
    refused={
        **DENSE_REFUSED,
        "scale_attn_weights": ((True,), "true, scores divided by the root of the head size"),
        "scale_attn_by_inverse_layer_idx": ((False,), "false"),
    },
    aliases={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "n_ctx": "n_positions",
    },
    no_dropout=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
)
