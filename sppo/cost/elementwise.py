"""Element-wise kernels of one layer: names, number of calls, and elements of each call.

The bytes of a kernel are the minimum that it must transfer: every input read and every output
written once. Without measurements, these bytes are transferred at the device's memory bandwidth.
`sppo bench` divides the same bytes by the measured time of each kernel, so a kernel that transfers
more, or is bound by compute, has a lower rate (:class:`sppo.hardware.rates.ElementwisePoint`).

Legend: C tokens of a subsequence, E hidden, N query heads, K key/value heads, D head size, F MLP
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from sppo.activations.tensor_classes import tensor_bytes_per_token
from sppo.config.model import ModelConfig
from sppo.hardware.description import DeviceSpec
from sppo.hardware.rates import Floats

_ACCUMULATION_BYTES = 4

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
    "copy": (2, 0),
    "narrow": (1, 1),
    "save": (2, 0),
    "bias_gradient": (1, 0),
    "swiglu": (3, 0),
    "swiglu_backward": (6, 0),
    "gelu": (2, 0),
    "gelu_backward": (4, 0),
    "gelu_tanh": (2, 0),
    "gelu_tanh_backward": (4, 0),
    "loss_gradient": (3, 0),
    "adamw": (0, 11),
}
"""Elements read and written per element of the operand, in the compute dtype and in fp32.

``rmsnorm_add`` reads two tensors and writes their sum and the norm of the sum;
``rmsnorm_add_backward`` adds the residual's gradient to the norm's; ``layernorm_add`` and its
backward count alike. ``swiglu_backward`` reads three tensors and writes three, since it also
recomputes the output of ``swiglu``. ``loss_gradient`` reads a tile of logits twice, for the loss
and for the gradient, which overwrites the logits. ``adamw`` covers all fp32 traffic of a parameter
per step: the gradient is zeroed, read for the norm, read and written by clipping, and read by the
update, which reads and writes the master and two moments. ``narrow`` writes weights whose dtype is
smaller than that of their masters."""


@dataclass(frozen=True, slots=True)
class Work:
    """Call of an element-wise kernel on `width` elements of every token."""

    kernel: str
    width: int


def bytes_per_element(kernel: str, *, element_bytes: int) -> float:
    """Return the bytes that `kernel` reads and writes per element of its operand."""
    in_compute_dtype, in_fp32 = PASSES[kernel]
    return in_compute_dtype * element_bytes + in_fp32 * _ACCUMULATION_BYTES


def work_seconds(
    device: DeviceSpec, dtype: str, *, work: Iterable[Work], tokens: Floats, element_bytes: int
) -> Floats:
    """Return the seconds of the kernels `work` on subsequences of `tokens`, [subsequences]."""
    seconds = np.zeros_like(tokens)
    for item in work:
        elements = tokens * item.width
        rate = device.elementwise_bytes_per_s(item.kernel, dtype, elements=elements)
        offloaded = elements * bytes_per_element(item.kernel, element_bytes=element_bytes)
        seconds += offloaded / rate
    return seconds


def forward_work(model: ModelConfig) -> Iterator[Work]:
    """Yield the kernels of a layer's forward: norms, rotation, K/V copies, MLP, residuals."""
    e, query, key = _widths(model)
    yield Work(model.norm, e)
    for width in (query, key):
        yield from _towards_attention(model, width)
    yield from (Work("copy", key),) * 2
    yield Work(f"{model.norm}_add", e)
    yield Work(model.mlp, model.mlp_size)
    yield Work("add", e)


def backward_work(model: ModelConfig, *, element_bytes: int) -> Iterator[Work]:
    """Yield the kernels of a layer's backward that recomputes only norms and activations."""
    e, query, key = _widths(model)
    yield from (Work(model.norm, e), Work(f"{model.norm}_add_backward", e)) * 2
    if model.qk_norm:
        # Queries are saved before their norm, so its output is recomputed.
        yield from _towards_attention(model, query)
    for width in (query, key):
        if model.position == "rotary":
            yield Work("rotary", width)
        if model.qk_norm:
            yield Work("head_norm_backward", width)
    if element_bytes < _ACCUMULATION_BYTES:
        yield from (Work("narrow", key),) * 2
    yield Work(f"{model.mlp}_backward", model.mlp_size)
    yield from _bias_gradients(model)


def linear_recompute_work(model: ModelConfig) -> Iterator[Work]:
    """Yield the element-wise kernels that recompute the linear class, without matrix products."""
    e, query, _ = _widths(model)
    if not model.qk_norm:
        yield from _towards_attention(model, query)
    yield Work("add", e)


def kv_work(model: ModelConfig) -> Iterator[Work]:
    """Yield the element-wise kernels that recompute K and V from a layer's input."""
    e, _, key = _widths(model)
    yield Work(model.norm, e)
    yield from _towards_attention(model, key)
    yield from (Work("copy", key),) * 2


def saving_work(model: ModelConfig, *, names: Iterable[str]) -> Iterator[Work]:
    """Yield the copies of the saved tensors `names` onto the saved-tensor stack of a CPU run."""
    elements = tensor_bytes_per_token(model, element_bytes=1)
    for name in names:
        if name != "lse":
            yield Work("save", elements[name])


def _widths(model: ModelConfig) -> tuple[int, int, int]:
    return (
        model.hidden_size,
        model.num_heads * model.head_dim,
        model.kv_heads * model.head_dim,
    )


def _towards_attention(model: ModelConfig, width: int) -> Iterator[Work]:
    """Yield the kernels on queries or keys between their projection and attention."""
    if model.qk_norm:
        yield Work("head_norm", width)
    if model.position == "rotary":
        yield Work("rotary", width)


def _bias_gradients(model: ModelConfig) -> Iterator[Work]:
    e, query, key = _widths(model)
    if model.qkv_bias:
        yield from (Work("bias_gradient", width) for width in (query, key, key))
    if model.output_bias:
        yield Work("bias_gradient", e)
    if model.mlp_bias:
        yield from (Work("bias_gradient", width) for width in (model.mlp_size, e))
