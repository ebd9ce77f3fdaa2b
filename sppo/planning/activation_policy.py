"""Which named tensors of a layer are saved under each policy, and what they weigh.

Classes in order of value per byte: x_in > (o, lse) > {gate, up, q, x_mid, k}; see the table in
:mod:`sppo.model.layer` for what each one is rebuilt from.
"""

from __future__ import annotations

from sppo.config.model import ModelConfig

POLICIES = ("retain", "keep_attention", "recompute")
"""Policies that move nothing, from most memory to least."""

_LSE_BYTES = 4


def saved_tensors(policy: str, model: ModelConfig) -> frozenset[str]:
    """Names kept between forward and backward.

    Raises:
        ValueError: not one of :data:`POLICIES`.
    """
    if policy == "recompute":
        return frozenset({"x_in"})
    if policy == "keep_attention":
        return frozenset({"x_in", "o", "lse"})
    if policy == "retain":
        return frozenset(tensor_bytes_per_token(model, element_bytes=1))
    raise ValueError(f"activation policy {policy!r} is not one of {', '.join(POLICIES)}")


def tensor_bytes_per_token(model: ModelConfig, *, element_bytes: int) -> dict[str, int]:
    """Bytes per token and layer of every tensor a layer of ``model`` may save."""
    e, nd = model.hidden_size, model.num_heads * model.head_dim
    sizes = {
        "x_in": e * element_bytes,
        "q": nd * element_bytes,
        "o": nd * element_bytes,
        "lse": model.num_heads * max(_LSE_BYTES, element_bytes),
        "x_mid": e * element_bytes,
        "up": model.mlp_size * element_bytes,
    }
    if model.gated:
        sizes["gate"] = model.mlp_size * element_bytes
    if model.qk_norm:
        sizes["k"] = model.kv_heads * model.head_dim * element_bytes
    return sizes


def saved_bytes_per_token(policy: str, model: ModelConfig, *, element_bytes: int) -> int:
    """Bytes per token and layer that ``policy`` keeps, K/V not included."""
    sizes = tensor_bytes_per_token(model, element_bytes=element_bytes)
    return sum(sizes[name] for name in saved_tensors(policy, model))
