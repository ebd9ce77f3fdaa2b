"""Families and settings that are refused by name, with what can be done."""

from __future__ import annotations

from collections.abc import Mapping

from sppo.config.huggingface.family import Only

_MLA = "no latent attention (MLA), which stores no keys and values per head; use glm4_moe"
_PARALLEL = "no attention beside the MLP in one residual step; use llama, phi3 or olmo3"
_GEMMA4 = "no heads of several sizes, shared keys or inputs per layer; use gemma3_text"
_VISION = "no vision tower; extract the language model as a model of its own"

REFUSED_FAMILIES: Mapping[str, str] = {
    "gemma": "no models of its generation; use gemma3_text",
    "gemma2": "no soft caps of scores and logits; use gemma3_text, which has none",
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma3n", "gemma3n_text"), _GEMMA4),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _MLA),
    **dict.fromkeys(("phi", "cohere", "cohere2", "gptj", "gpt_neox"), _PARALLEL),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mllama", "llama4"), _VISION),
    "ministral3": "no scale of queries that depends on the position; use ministral",
}
"""Reasons why families are refused, and families to use in place of them, by ``model_type``."""

DENSE = ((0,), "null, dense models")

REFUSED: Mapping[str, Only] = {
    "quantization_config": ((), "null, plain weights; dequantize the model and save it again"),
    "is_encoder_decoder": ((False,), "false, decoder-only models"),
    "add_cross_attention": ((False,), "false, decoder-only models"),
    "is_causal": ((True,), "true, causal attention"),
    "pruned_heads": (({}, []), "null, all heads"),
}
"""Settings that no family may have."""

DENSE_REFUSED: Mapping[str, Only] = {
    **REFUSED,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), DENSE),
}
"""Settings that no family without experts may have."""
