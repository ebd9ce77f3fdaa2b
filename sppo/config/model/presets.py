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
    "qk_norm": "head",
}
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "head_size": 64,
    "norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "max_positions": 131072,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_positions": 4096,
        "truncate": False,
    },
    "mlp": "swiglu_clamped",
    "qkv_bias": True,
    "output_bias": True,
    "attention_sinks": True,
    "sliding_window": 128,
    "layer_types": ["sliding", "full"],
}
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262208,
    "mlp": "geglu_tanh",
    "norm_placement": "both",
    "norm_offset": True,
    "norm_eps": 1e-6,
    "qk_norm": "head",
    "tie_embeddings": True,
    "rope_theta": 1_000_000.0,
    "max_positions": 131072,
    "rope_scaling": {"type": "linear", "factor": 8.0},
    "sliding_rope_theta": 10_000.0,
    "sliding_window": 1024,
    "layer_types": [*["sliding"] * 5, "full"],
}
_QWEN35: dict[str, Any] = {
    "vocab_size": 248320,
    "head_size": 256,
    "norm_offset": True,
    "norm_eps": 1e-6,
    "qk_norm": "head",
    "rope_theta": 10_000_000.0,
    "rotary_fraction": 0.25,
    "max_positions": 262144,
    "attention_gate": True,
    "layer_types": [*["linear"] * 3, "full"],
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


def _experts(count: int, per_token: int, mlp: int, **fields: Any) -> dict[str, Any]:
    return {"experts": {"count": count, "per_token": per_token, "mlp_size": mlp, **fields}}


def _gemma3(*shape: int, head: int) -> dict[str, Any]:
    fields = {**_GEMMA3, **_shape(*shape), "head_size": head}
    return {**fields, "embedding_scale": fields["hidden_size"] ** 0.5}


def _qwen35(*shape: int, value_heads: int) -> dict[str, Any]:
    linear = {"key_heads": 16, "value_heads": value_heads}
    return {**_QWEN35, **_shape(*shape), "linear_attention": linear}


def _qwen35_experts(*shape: int, count: int, per_token: int) -> dict[str, Any]:
    shared = {"shared_mlp_size": 512, "shared_switch": True, "normalize": True}
    experts = _experts(count, per_token, 512, **shared)
    return {**_qwen35(*shape, value_heads=32), **experts}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    router = {"bias": True, "router_bias": True, "score": "softmax_chosen"}
    return {**_GPT_OSS, **_shape(layers, 2880, 64, 8, 2880), **_experts(experts, 4, 2880, **router)}


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
    "ministral-8b": {
        **_shape(36, 4096, 32, 8, 12288),
        "vocab_size": 131072,
        "norm_eps": 1e-5,
        "rope_theta": 100_000_000.0,
        "max_positions": 131072,
        "sliding_window": 32768,
        "layer_types": ["full", *["sliding"] * 3],
    },
    "phi-4": {
        **_shape(40, 5120, 40, 10, 17920),
        "vocab_size": 100352,
        "norm_eps": 1e-5,
        "rope_theta": 250_000.0,
        "max_positions": 16384,
        # Its layers are Llama's, too, and its files are not.
        "family": "phi3",
    },
    "smollm3-3b": {
        **_shape(36, 2048, 16, 4, 11008),
        "vocab_size": 128256,
        "norm_eps": 1e-6,
        "rope_theta": 5_000_000.0,
        "max_positions": 65536,
        "rotary_layers": [True, True, True, False],
        "tie_embeddings": True,
    },
    "olmo-3-7b": {
        **_shape(32, 4096, 32, 32, 11008),
        "vocab_size": 100278,
        "norm_placement": "post",
        "norm_eps": 1e-6,
        "qk_norm": "all",
        "rope_theta": 500_000.0,
        "max_positions": 65536,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_positions": 8192},
        "sliding_rope_theta": 500_000.0,
        "sliding_window": 4096,
        "layer_types": [*["sliding"] * 3, "full"],
    },
    "gemma-3-4b": _gemma3(34, 2560, 8, 4, 10240, head=256),
    "gemma-3-12b": _gemma3(48, 3840, 16, 8, 15360, head=256),
    "gemma-3-27b": {
        **_gemma3(62, 5376, 32, 16, 21504, head=128),
        "attention_scale": 168**-0.5,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        **_shape(48, 2048, 32, 4, 6144),
        **_experts(128, 8, 768, normalize=True),
    },
    "qwen3-235b-a22b": {
        **_QWEN3,
        **_shape(94, 4096, 64, 4, 12288),
        **_experts(128, 8, 1536, normalize=True),
    },
    "qwen3-next-80b-a3b": {
        **_qwen35_experts(48, 2048, 16, 2, 5120, count=512, per_token=10),
        "family": "qwen3_next",
        "vocab_size": 151936,
    },
    "qwen3.5-4b": {**_qwen35(32, 2560, 16, 4, 9216, value_heads=32), "tie_embeddings": True},
    "qwen3.5-9b": _qwen35(32, 4096, 16, 4, 12288, value_heads=32),
    "qwen3.5-27b": _qwen35(64, 5120, 24, 4, 17408, value_heads=48),
    "qwen3.5-35b-a3b": {
        # All of its layers have experts, so the width of an MLP is that of one of them.
        **_qwen35_experts(40, 2048, 16, 2, 512, count=256, per_token=8),
        # Its layers are those of Qwen3-Next, and its files are not.
        "family": "qwen3_5_moe_text",
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "mixtral-8x7b": {
        **_shape(32, 4096, 32, 8, 14336),
        **_experts(8, 2, 14336, normalize=True),
        "vocab_size": 32000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_positions": 32768,
    },
    "glm-4.5-air": {
        **_shape(46, 4096, 96, 8, 10944),
        **_experts(
            128,
            8,
            1408,
            shared_mlp_size=1408,
            score="sigmoid",
            normalize=True,
            choice_bias=True,
            dense_layers=1,
        ),
        "vocab_size": 151552,
        "head_size": 128,
        "norm_eps": 1e-5,
        "qkv_bias": True,
        "rope_theta": 1_000_000.0,
        "rotary_fraction": 0.5,
        "max_positions": 131072,
    },
    # Byte-level shapes for a laptop: the quickstart trains `tiny`, the tests use `tiny-test`.
    "tiny": {**_TINY, **_shape(2, 256, 2, 1, 704), "head_size": 64, "tie_embeddings": True},
    "tiny-gpt": {**_GPT, **_TINY, **_shape(4, 256, 4, 4, 1024), "position": "learned"},
    "tiny-test": {**_TINY, **_shape(2, 32, 4, 2, 64)},
}
"""Fields of :class:`sppo.config.model.ModelConfig` by preset name."""
