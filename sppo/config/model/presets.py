"""Built-in model shapes, as published in each model's own config.json.

The ``gpt-*`` shapes are those of the SPPO paper, Table 2. The paper gives layers, hidden size and
heads; vocabulary, biases and the 4x MLP are GPT-2's. Positions are rotary: a learned table of 4M
rows would have more parameters than the model.
"""

from __future__ import annotations

from typing import Any

from sppo.units import MIB

_GPT: dict[str, Any] = {
    "vocab_size": 50257,
    "mlp": "gelu_tanh",
    "norm": "layernorm",
    "position": "rotary",
    "max_positions": 4 * MIB,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "tie_embeddings": True,
}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_positions": 131072,
    "rope_scaling": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_positions": 8192,
    },
}
_LLAMA32 = {
    **_LLAMA3,
    "rope_scaling": {**_LLAMA3["rope_scaling"], "factor": 32.0},
    "tie_embeddings": True,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_size": 128,
    "num_kv_heads": 8,
    "norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_positions": 40960,
    "qk_norm": True,
}
_TINY: dict[str, Any] = {"vocab_size": 257, "max_positions": 131072, "rope_theta": 500_000.0}


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "mlp_size": mlp,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gpt-7b": {**_GPT, **_shape(32, 4096, 32, 32, 16384)},
    "gpt-13b": {**_GPT, **_shape(40, 5120, 40, 40, 20480)},
    "gpt-65b": {**_GPT, **_shape(80, 8192, 64, 64, 32768)},
    "llama-3.2-1b": {**_LLAMA32, **_shape(16, 2048, 32, 8, 8192)},
    "llama-3.2-3b": {**_LLAMA32, **_shape(28, 3072, 24, 8, 8192)},
    "llama-3.1-8b": {**_LLAMA3, **_shape(32, 4096, 32, 8, 14336)},
    "llama-3.1-70b": {**_LLAMA3, **_shape(80, 8192, 64, 8, 28672)},
    "qwen2.5-7b": {
        **_shape(28, 3584, 28, 4, 18944),
        "vocab_size": 152064,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_positions": 131072,
        "qkv_bias": True,
    },
    "qwen3-0.6b": {**_QWEN3, **_shape(28, 1024, 16, 8, 3072), "tie_embeddings": True},
    "qwen3-1.7b": {**_QWEN3, **_shape(28, 2048, 16, 8, 6144), "tie_embeddings": True},
    "qwen3-4b": {**_QWEN3, **_shape(36, 2560, 32, 8, 9728), "tie_embeddings": True},
    "qwen3-8b": {**_QWEN3, **_shape(36, 4096, 32, 8, 12288)},
    "mistral-7b": {
        **_shape(32, 4096, 32, 8, 14336),
        "vocab_size": 32000,
        "max_positions": 32768,
        "sliding_window": 4096,
        # If its window is removed, it would otherwise be exported as a Llama.
        "family": "mistral",
    },
    # Byte-level shapes for a laptop: the quickstart trains `tiny`, the tests use `tiny-test`.
    "tiny": {**_TINY, **_shape(2, 256, 2, 1, 704), "head_size": 64, "tie_embeddings": True},
    "tiny-gpt": {**_GPT, **_TINY, **_shape(4, 256, 4, 4, 1024), "position": "learned"},
    "tiny-test": {**_TINY, **_shape(2, 32, 4, 2, 64)},
}
"""Fields of :class:`sppo.config.model.ModelConfig` by preset name."""
