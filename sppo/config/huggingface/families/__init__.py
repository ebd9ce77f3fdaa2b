"""Records of families of Hugging Face models."""

from __future__ import annotations

from collections.abc import Mapping

from sppo.config.huggingface.families import experts, gpt2, granite, llama, post_norms, qwen
from sppo.config.huggingface.families.refused import REFUSED_FAMILIES
from sppo.config.huggingface.family import HfFamily
from sppo.config.model import Family

__all__ = ["FAMILIES", "REFUSED_FAMILIES"]

FAMILIES: Mapping[Family, HfFamily] = {
    "llama": llama.LLAMA,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "mistral": llama.MISTRAL,
    "gpt2": gpt2.GPT2,
    "ministral": llama.MINISTRAL,
    "smollm3": llama.SMOLLM3,
    "seed_oss": llama.SEED_OSS,
    "phi3": llama.PHI3,
    "granite": granite.GRANITE,
    "arcee": llama.ARCEE,
    "exaone4": post_norms.EXAONE4,
    "olmo2": post_norms.OLMO2,
    "olmo3": post_norms.OLMO3,
    "gemma3_text": post_norms.GEMMA3,
    "glm4": post_norms.GLM4,
    "mixtral": experts.MIXTRAL,
    "qwen2_moe": qwen.QWEN2_MOE,
    "qwen3_moe": qwen.QWEN3_MOE,
    "olmoe": experts.OLMOE,
    "gpt_oss": experts.GPT_OSS,
    "glm4_moe": experts.GLM4_MOE,
    "qwen3_5_text": qwen.QWEN3_5,
    "qwen3_5_moe_text": qwen.QWEN3_5_MOE,
    "qwen3_next": qwen.QWEN3_NEXT,
}
"""Families by name, in the order in which one is chosen for a model without a family."""
