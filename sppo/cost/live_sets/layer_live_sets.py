"""Live sets of a layer and of the loss: the tensors that are live at each point of a pass.

On a GPU a tensor is freed with its last reference, and chains of element-wise operations are one
kernel each and take no memory. On a CPU these chains count as tiles (:mod:`sppo.kernels.row_tiles`)
and torch's kernels with their observed scratch (:mod:`sppo.cost.live_sets.cpu_scratch`, whose
functions return 0 for a GPU).

*Retained* classes (`TensorSizes.retained`), which stay in memory of torch's allocator from forward
to backward, count as held during the whole forward and backward of their unit
(:mod:`sppo.cost.memory.walk`). So the live bytes here are reduced, in a forward by
tensors that the layer has yet to save, in a backward by tensors that it has already freed.

Legend: C tokens of the subsequence on one device, E hidden, Q = N D query width, K D key width, F
MLP width, V vocabulary, e element bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from sppo.activations.tensor_classes import ATTENTION, LINEAR, X_IN
from sppo.cost.live_sets import (
    attention_mixer_live_sets,
    expert_live_sets,
    linear_mixer_live_sets,
    mlp_live_sets,
)
from sppo.cost.live_sets.cpu_scratch import product_bytes, tiles_bytes, weight_gradient_bytes
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.cost.tiles import tile_tokens
from sppo.cost.trainable import trains_head


def layer_forward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    """Yield the live sets of a layer's forward."""
    mixer = _mixer(s)
    inputs, outputs = mixer.saved_bytes(s)
    inputs *= LINEAR not in recomputed
    outputs *= ATTENTION not in recomputed
    to_save = (inputs + s.hidden_bytes + s.gates_bytes + s.output_bytes) * (LINEAR in s.retained)
    to_save += outputs * (ATTENTION in s.retained)
    base = s.rotary_bytes + s.hidden_bytes * (X_IN not in s.retained) - to_save
    for name, live in mixer.mixer_forward(s, recomputed=recomputed):
        yield name, base + live
    # x_mid, and with norms of outputs the saved output of the mixer.
    base += inputs + outputs + s.hidden_bytes + s.output_bytes * (LINEAR not in recomputed)
    for name, live in _mlp(s).mlp_forward(s):
        yield name, base + live


def layer_backward(
    s: TensorSizes, *, recomputed: frozenset[int], input_every: int, layers: int
) -> Iterator[LiveSet]:
    """Yield the live sets of a layer's backward."""
    own_linear, own_attention = LINEAR in recomputed, ATTENTION in recomputed
    interval = 1 if own_attention else min(input_every, layers)
    linear = s.hidden_bytes + s.gates_bytes + s.output_bytes
    below = s.hidden_bytes + linear * own_linear
    base = s.rotary_bytes + (interval - 1) * below + s.normed_bytes  # n1
    # Gradient from the layer above: the last layer's is saved, and another's takes the place of the
    # freed input of the layer above.
    if layers > interval and X_IN not in s.freed:
        base += s.hidden_bytes
    mixer = _mixer(s)
    for name, live in mixer.mixer_recomputation(s, recomputed=recomputed):
        yield name, base + live
    base += mixer.recomputed_bytes(s, recomputed=recomputed)
    inputs = s.hidden_bytes + s.gates_bytes if own_linear else 0  # x_mid, gate and up
    # With norms of outputs: x_mid beside the output of the mixer; that of the MLP is free.
    inputs += s.output_bytes + s.output_gradient_bytes
    base -= s.output_bytes * (LINEAR in s.freed)
    for name, live in _mlp(s).mlp_backward(s):
        yield name, base + inputs + live
    freed = (s.gates_bytes + s.hidden_bytes) * (LINEAR in s.freed)
    base += s.hidden_bytes - freed  # dx_mid
    for name, live in mixer.mixer_backward(s, recomputed=recomputed):
        yield name, base + live


def loss(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live sets of the final norm, the head and the loss, forward and backward in one.

    On a GPU, the resulting gradient of the last layer's output is saved and counts as held from the
    begin of the unit.
    """
    vocabulary, hidden = s.model.vocab_size, s.model.hidden_size
    of_tile = tile_tokens(
        vocabulary, element_bytes=s.element_bytes, device=s.workload.hardware.device.kind
    )
    logits = min(s.tokens, of_tile) * vocabulary * s.element_bytes
    # Output of the last layer, its norm, and on a CPU the norm's gradient.
    base = s.rotary_bytes + (3 if s.threads else 2) * s.hidden_bytes
    yield "logits", base + logits + tiles_bytes(s, 1, width=vocabulary) * s.is_half
    trains = trains_head(s.model, s.workload.trainable)
    scratch = weight_gradient_bytes(s, vocabulary, hidden) if trains else product_bytes(s)
    yield "logit gradients", base + logits + scratch
    yield "final norm", base + s.hidden_bytes + tiles_bytes(s, 5, width=hidden)


def _mlp(s: TensorSizes) -> ModuleType:
    """Return the module with the live sets of the MLP, or of the experts, of the layer."""
    return expert_live_sets if s.kind.type.routed else mlp_live_sets


def _mixer(s: TensorSizes) -> ModuleType:
    """Return the module with the live sets of the token mixer of the layer."""
    return attention_mixer_live_sets if s.kind.linear is None else linear_mixer_live_sets
