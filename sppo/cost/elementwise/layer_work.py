"""Element-wise kernels of one layer: names, number of calls, and elements of each call.

The bytes of a kernel are the minimum that it must transfer: every input read and every output
written once. Without measurements, these bytes are transferred at the device's memory bandwidth.
`sppo bench` divides the same bytes by the measured time of each kernel, so a kernel that transfers
more, or is bound by compute, has a lower rate (:class:`sppo.hardware.rates.ElementwisePoint`).

Legend: C tokens of a subsequence, E hidden, N query heads, K key/value heads, D head size, F MLP
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from sppo.activations.tensor_classes import CHOSEN, tensor_bytes_per_token
from sppo.config.model import (
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    LayerType,
    ModelConfig,
)
from sppo.cost.elementwise.linear_attention_work import linear_attention_work
from sppo.cost.elementwise.mlp_work import Work, bias_gradients, mlp_work
from sppo.cost.workload import ACCUMULATION_BYTES

PASSES: Mapping[str, tuple[float, float]] = {
    "rmsnorm": (2, 0),
    "rmsnorm_backward": (3, 0),
    "rmsnorm_add": (4, 0),
    "rmsnorm_add_backward": (4, 0),
    "layernorm": (2, 0),
    "layernorm_backward": (3, 0),
    "layernorm_add": (4, 0),
    "layernorm_add_backward": (4, 0),
    "head_norm": (2, 0),
    "head_norm_backward": (3, 0),
    "rotary": (2, 0),
    "add": (3, 0),
    "scale": (2, 0),
    "sinks": (2, 0),
    "sink_gradient": (2, 0),
    "copy": (2, 0),
    "narrow": (1, 1),
    "save": (2, 0),
    "bias_gradient": (1, 0),
    **dict.fromkeys(GATED_ACTIVATIONS, (3, 0)),
    **{f"{kind}_backward": (6, 0) for kind in GATED_ACTIVATIONS},
    **dict.fromkeys(PLAIN_ACTIVATIONS, (2, 0)),
    **{f"{kind}_backward": (4, 0) for kind in PLAIN_ACTIVATIONS},
    "loss_gradient": (3, 0),
    "adamw": (0, 11),
}
"""Elements read and written per element of the operand, in the compute dtype and in fp32.

``rmsnorm_add`` reads two tensors and writes their sum and the norm of the sum;
``rmsnorm_add_backward`` adds the residual's gradient to the norm's; ``layernorm_add`` and its
backward count alike. The backward of an activation with a gate reads three tensors and writes
three, since it also recomputes the activation's output. ``loss_gradient`` reads a tile of logits
twice, for the loss and for the gradient, which overwrites the logits. ``adamw`` covers all fp32
traffic of a parameter per step: the gradient is zeroed, read for the norm, read and written by
clipping, and read by the update, which reads and writes the master and two moments. ``narrow``
writes weights whose dtype is smaller than that of their masters."""


_BACKWARDS = {
    "head_norm": "head_norm_backward",
    "rmsnorm": "rmsnorm_backward",
    "rotary": "rotary",
}
"""Kernels of the gradients of kernels on queries and keys."""
_QK_NORMS = {"head": "head_norm", "all": "rmsnorm"}


def bytes_per_element(kernel: str, *, element_bytes: int) -> float:
    """Return the bytes that `kernel` reads and writes per element of its operand."""
    in_compute_dtype, in_fp32 = PASSES[kernel]
    return in_compute_dtype * element_bytes + in_fp32 * ACCUMULATION_BYTES


def layer_work(
    model: ModelConfig, layer_type: LayerType, *, element_bytes: int, trained: Collection[str]
) -> Mapping[str, list[Work]]:
    """Return the kernels of passes over a layer.

    Args:
        model: Model configuration.
        layer_type: Type of the layer.
        element_bytes: Bytes of an element of the compute dtype.
        trained: Names of the parameters that have gradients, of which biases matter here.

    Returns:
        Kernels of "forward"; of "backward", which recomputes only norms and activations; of
        "linear_recompute" and "attention_recompute", the recomputation of both classes; and of
        "kv", the recomputation of K and V from the layer's input; without matrix products.
    """
    stream, mlp = _stream_work(model), mlp_work(model, layer_type, trained=trained)
    linear = model.linear_attention_of(layer_type)
    mixer = (
        _attention_work(model, layer_type, element_bytes=element_bytes, trained=trained)
        if linear is None
        else linear_attention_work(linear, element_bytes=element_bytes)
    )
    # With norms of outputs, the output of the MLP is in the linear class.
    mlp_again = mlp["forward" if model.norms_outputs else "linear_recompute"]
    return {
        "forward": [*stream["input"], *mixer["forward"], *stream["forward"], *mlp["forward"]],
        "backward": [*stream["backward"], *mlp["backward"], *mixer["backward"]],
        "linear_recompute": [*mixer["linear_recompute"], *stream["recompute"], *mlp_again],
        "attention_recompute": mixer["attention_recompute"],
        "kv": [*stream["input"], *mixer["kv"]],
    }


def _attention_work(
    model: ModelConfig, layer_type: LayerType, *, element_bytes: int, trained: Collection[str]
) -> Mapping[str, list[Work]]:
    """Return the kernels between the inputs and the output of attention, see :func:`layer_work`."""
    query, key = model.num_heads * model.head_dim, model.kv_heads * model.head_dim
    between = _kernels_of_heads(model, layer_type)
    queries, keys = ([(kernel, width) for kernel in between] for width in (query, key))
    sinks: list[Work] = [("sinks", query)] * model.attention_sinks
    gate: list[Work] = [("add", query)] * model.attention_gate
    kv = [*keys, *[("copy", key)] * 2]
    backward, recompute = [*gate, *gate], [*gate]
    # Queries are saved before their norm if there is one, and after their rotation otherwise.
    (backward if model.qk_norm else recompute).extend(queries)
    for width in (query, key):
        backward += [(_BACKWARDS[kernel], width) for kernel in reversed(between)]
    if element_bytes < ACCUMULATION_BYTES:
        backward += [("narrow", key)] * 2
    if "sinks.weight" in trained:
        backward.append(("sink_gradient", query))
    widths = {"q": query, "k": key, "v": key, "attention_gate": query, "o": model.hidden_size}
    backward += bias_gradients(widths, trained=trained)
    return {
        "forward": [*kv, *queries, *sinks, *gate],
        "backward": backward,
        "linear_recompute": recompute,
        "attention_recompute": sinks,
        "kv": kv,
    }


def _kernels_of_heads(model: ModelConfig, layer_type: LayerType) -> list[str]:
    """Return the kernels on queries, and on keys, between their projection and attention."""
    kernels = [] if model.qk_norm is None else [_QK_NORMS[model.qk_norm]]
    return kernels if layer_type.rotation is None else [*kernels, "rotary"]


def _stream_work(model: ModelConfig) -> Mapping[str, list[Work]]:
    """Return the kernels on the residual stream, see :mod:`sppo.model.residual`.

    Returns:
        Kernels of the "input" of attention, of the rest of "forward", of "backward", and those that
        "recompute" the stream in the middle of the layer.
    """
    e, norm = model.hidden_size, model.norm
    scale = [("scale", e)] * (model.residual_scale != 1)
    of_norm: Work = (norm, e)
    normed_input, normed_output = [of_norm] * model.norms_inputs, [of_norm] * model.norms_outputs
    term = [*normed_output, *scale]
    middle = [*term, ("add", e)]
    of_output = [*scale, *[(f"{norm}_backward", e)] * model.norms_outputs]
    of_input = [(f"{norm}_add_backward" if model.norms_inputs else "add", e)]
    backward = 2 * [*normed_input, *of_output, *of_input]
    with_norm = [*term, (f"{norm}_add", e)] if model.norms_inputs else middle
    return {
        "input": normed_input,
        "forward": [*with_norm, *middle],
        # With post norms the outputs before their norms are saved, and not the stream.
        "backward": backward + middle * model.norms_outputs,
        "recompute": [] if model.norms_outputs else middle,
    }


def saving_work(
    model: ModelConfig, layer_type: LayerType, *, names: Iterable[str]
) -> Iterator[Work]:
    """Yield the copies of the saved tensors `names` onto the saved-tensor stack of a CPU run."""
    elements = tensor_bytes_per_token(model, layer_type, element_bytes=1)
    for name in names:
        if name not in ("lse", CHOSEN):
            yield "save", elements[name]
