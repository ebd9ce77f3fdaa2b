"""Live sets of linear attention as the token mixer of a layer, beside the tensors of the layer.

They follow :mod:`sppo.model.linear_mixer`, and count the norm of the layer's input in forward
alone: backward has it throughout.

Legend: C tokens of the subsequence on one device, V width of all values.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.activations.tensor_classes import LINEAR
from sppo.cost.live_sets.cpu_scratch import product_bytes, tiles_bytes, weight_gradient_bytes
from sppo.cost.live_sets.recurrence_live_sets import recurrence_backward, recurrence_forward
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes


def saved_bytes(s: TensorSizes) -> tuple[int, int]:
    """Return the bytes of what the mixer may save: of the linear class, and of attention."""
    return s.linear_input_bytes + s.values_bytes, 0


def mixer_forward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    """Yield the live sets of the forward."""
    yield "projections", s.normed_bytes + _projection_bytes(s)
    saved, _ = saved_bytes(s)
    yield "recurrence", saved + recurrence_forward(s)
    kept = s.values_bytes if LINEAR in recomputed else saved
    for name, live in _output(s):
        yield name, kept + live


def mixer_recomputation(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    """Yield the live sets of what backward recomputes before that of the MLP."""
    if LINEAR not in recomputed:
        return
    saved, _ = saved_bytes(s)
    yield "projections recomputed", _projection_bytes(s)
    yield "recurrence recomputed", saved + recurrence_forward(s)
    for name, live in _output(s):
        yield f"{name} recomputed", saved + live + s.values_bytes * (name == "output")


def recomputed_bytes(s: TensorSizes, *, recomputed: frozenset[int]) -> int:
    """Return the bytes of what is recomputed before the MLP's backward, and live until its own.

    They are those of all that may be saved, and of the outputs of the recurrence.
    """
    return (saved_bytes(s)[0] + s.values_bytes) * (LINEAR in recomputed)


def mixer_backward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    """Yield the live sets of the backward, beside what was recomputed before."""
    again = recomputed_bytes(s, recomputed=recomputed)
    outputs = 0 if again else s.values_bytes
    if not again:
        yield "recurrence recomputed", recurrence_forward(s)
    # The gradient behind the gate, the outputs behind the norm, and the gradient of the outputs.
    tiles = tiles_bytes(s, 5, width=s.linear.value_size)
    yield "norm and gate backward", outputs + 3 * s.values_bytes + tiles
    scratch = max(product_bytes(s), weight_gradient_bytes(s, *_output_shape(s)))
    yield "gradients of the output", outputs + 2 * s.values_bytes + scratch
    # The gradient of the outputs takes their place.
    yield "recurrence backward", outputs + recurrence_backward(s)
    freed = s.linear_input_bytes * (again > 0 or LINEAR in s.freed)
    freed += s.values_bytes * (again > 0)
    scratch = max(product_bytes(s, is_added=True), weight_gradient_bytes(s, *_output_shape(s)))
    yield "gradients of the inputs", s.linear_input_bytes + s.hidden_bytes + scratch - freed


def _projection_bytes(s: TensorSizes) -> int:
    """Return the bytes of projections, the largest of which is copied beside the others."""
    linear = s.linear
    keys = s.pooled(s.tokens * linear.keys_width * s.element_bytes)
    copied = max(keys, 2 * s.values_bytes)
    return s.linear_input_bytes + copied + product_bytes(s)


def _output(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live sets of norm, gate and projection of the outputs of the recurrence."""
    yield "norm and gate", 3 * s.values_bytes
    yield "output", s.values_bytes + s.hidden_bytes + product_bytes(s)


def _output_shape(s: TensorSizes) -> tuple[int, int]:
    """Return the shape of the weight of the output's projection."""
    return s.model.hidden_size, s.linear.values_width
