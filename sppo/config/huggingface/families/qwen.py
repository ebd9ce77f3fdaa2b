"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from sppo.config.huggingface.families.common import BIASES, DEFAULTS, rotary
from sppo.config.huggingface.families.refused import DENSE_REFUSED
from sppo.config.huggingface.family import HfFamily
from sppo.config.huggingface.layer_patterns import Windows, from_layer
from sppo.config.huggingface.rope import Rope
from sppo.config.huggingface.settings import Json
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
