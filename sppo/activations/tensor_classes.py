"""Tensors that a layer may save, in three classes, and their bytes.

The classes in the order of the value of a saved byte, highest first:

    x_in       the layer's input; nothing in the layer can recompute it
    attention  o and lse; recomputed by recomputing attention, whose cost grows with the context
    linear     q, k, attention_gate, x_mid, gate, up; with post norms attention_out in place of
               x_mid, and mlp_out; recomputed by matrix products, 4 sqrt(E F) FLOPs per byte

A layer with linear attention has nothing of the class attention, and in place of q and k the
inputs of its recurrence, linear_inputs, and of its gate, linear_gate. Backward runs its recurrence
again, whatever is saved.

:mod:`sppo.model.layer` says from which tensors each is recomputed. K and V are in none of the
classes: later subsequences read them, so they stay in the KV store. The experts that tokens have
chosen are in none either: they are always retained on the device, because a choice that is computed
again may differ.
"""

from __future__ import annotations

import numpy as np

from sppo.config.model import LayerType, ModelConfig
from sppo.schedule.costs import Table

CLASSES = ("x_in", "attention", "linear")
"""Tensor classes in the order of the value of a saved byte, highest first."""
X_IN, ATTENTION, LINEAR = range(3)
CHOSEN = "chosen"
"""Saved tensor of routed layers that is in no class: the numbers of the experts of each token."""
RESIDUAL = ("x_in", "x_mid", "attention_out", "mlp_out")
"""Tensors of the residual stream. With sharded weights (Megatron), a rank saves these for its own
tokens, and the other tensors for all tokens but only its own heads and part of the MLP width."""

_LSE_BYTES = 4
_CHOSEN_BYTES = 2


def tensors_of(
    classes: tuple[int, ...], model: ModelConfig, layer_type: LayerType
) -> frozenset[str]:
    """Return the names of the tensors in ``classes`` that a layer of a type has."""
    names = tensor_bytes_per_token(model, layer_type, element_bytes=1)
    return frozenset(name for name in names if name != CHOSEN and class_of(name) in classes)


def class_of(tensor: str) -> int:
    """Return the class of a layer's saved tensor, as an index of :data:`CLASSES`."""
    assert tensor != CHOSEN, "no class holds the chosen experts"
    return {"x_in": X_IN, "o": ATTENTION, "lse": ATTENTION}.get(tensor, LINEAR)


def tensor_bytes_per_token(
    model: ModelConfig, layer_type: LayerType, *, element_bytes: int
) -> dict[str, int]:
    """Return the bytes per token of every tensor that a layer of a type may save, by name."""
    linear = model.linear_attention_of(layer_type)
    widths = _attention_widths(model) if linear is None else linear.saved_widths
    outputs = ("attention_out", "mlp_out") if model.norms_outputs else ("x_mid",)
    widths |= dict.fromkeys(("x_in", *outputs), model.hidden_size)
    widths |= mlp_widths(model, layer_type)
    sizes = {name: width * element_bytes for name, width in widths.items()}
    if linear is None:
        sizes["lse"] = model.num_heads * max(_LSE_BYTES, element_bytes)
    if layer_type.routed:
        sizes[CHOSEN] = chosen_bytes_per_token(model, layer_type)
    return sizes


def _attention_widths(model: ModelConfig) -> dict[str, int]:
    """Return the widths of the tensors that attention saves in the compute dtype, by name."""
    queries = model.num_heads * model.head_dim
    widths = {"q": queries, "o": queries}
    if model.qk_norm:
        widths["k"] = model.kv_heads * model.head_dim
    if model.attention_gate:
        widths["attention_gate"] = queries
    return widths


def mlp_widths(model: ModelConfig, layer_type: LayerType) -> dict[str, int]:
    """Return the widths of the inputs of activation functions in a layer's MLP, by name.

    Experts have those of all experts of a token beside each other, and those of the shared MLP.
    """
    names, experts = model.mlp_inputs, model.experts_of(layer_type)
    if experts is None:
        return dict.fromkeys(names, model.mlp_size)
    widths = dict.fromkeys(names, experts.per_token * experts.mlp_size)
    if experts.shared_mlp_size:
        widths |= {f"shared_{name}": experts.shared_mlp_size for name in names}
    return widths


def chosen_bytes_per_token(model: ModelConfig, layer_type: LayerType) -> int:
    """Return the bytes per token of the numbers of its experts; 0 in layers that are not routed."""
    experts = model.experts_of(layer_type)
    return 0 if experts is None else _CHOSEN_BYTES * experts.per_token


def class_bytes_per_token(
    model: ModelConfig, layer_type: LayerType, *, element_bytes: int
) -> Table:
    """Return the bytes per token of each class in a layer of a type, [3] as :data:`CLASSES`."""
    sizes = tensor_bytes_per_token(model, layer_type, element_bytes=element_bytes)
    found = np.zeros(len(CLASSES))
    for name, size in sizes.items():
        if name != CHOSEN:
            found[class_of(name)] += size
    return found
