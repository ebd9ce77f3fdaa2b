"""Tensors that a layer may save, in three classes, and their bytes.

The classes in the order of the value of a saved byte, highest first:

    x_in       the layer's input; nothing in the layer can recompute it
    attention  o and lse; recomputed by recomputing attention, whose cost grows with the context
    linear     q, k, x_mid, gate, up; recomputed by matrix products, 4 sqrt(E F) FLOPs per byte

:mod:`sppo.model.layer` says from which tensors each is recomputed. K and V are in none of the
classes: later subsequences read them, so they stay in the KV store.
"""

from __future__ import annotations

import numpy as np

from sppo.config.model import ModelConfig
from sppo.schedule.costs import Table

CLASSES = ("x_in", "attention", "linear")
"""Tensor classes in the order of the value of a saved byte, highest first."""
X_IN, ATTENTION, LINEAR = range(3)
RESIDUAL = ("x_in", "x_mid")
"""Tensors of the residual stream. With sharded weights (Megatron), a rank saves these for its own
tokens, and the other tensors for all tokens but only its own heads and part of the MLP width."""

_LSE_BYTES = 4


def tensors_of(classes: tuple[int, ...], model: ModelConfig) -> frozenset[str]:
    """Return the names of the tensors in ``classes`` that a layer of ``model`` has."""
    names = tensor_bytes_per_token(model, element_bytes=1)
    return frozenset(name for name in names if class_of(name) in classes)


def class_of(tensor: str) -> int:
    """Return the class of a layer's saved tensor, as an index of :data:`CLASSES`."""
    return {"x_in": X_IN, "o": ATTENTION, "lse": ATTENTION}.get(tensor, LINEAR)


def tensor_bytes_per_token(model: ModelConfig, *, element_bytes: int) -> dict[str, int]:
    """Return the bytes per token and layer of every tensor that a layer of ``model`` may save."""
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


def class_bytes_per_token(model: ModelConfig, *, element_bytes: int) -> Table:
    """Return the bytes per token and layer of each class, [3] in the order of :data:`CLASSES`."""
    sizes = tensor_bytes_per_token(model, element_bytes=element_bytes)
    attention = sizes["o"] + sizes["lse"]
    return np.array(
        [sizes["x_in"], attention, sum(sizes.values()) - sizes["x_in"] - attention],
        dtype=np.float64,
    )
