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
    cpu_attention_live_sets,
    expert_live_sets,
    gpu_attention_live_sets,
    mlp_live_sets,
)
from sppo.cost.live_sets.cpu_scratch import (
    mlp_gradient_bytes,
    product_bytes,
    tiles_bytes,
    weight_gradient_bytes,
)
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.cost.tiles import tile_tokens
from sppo.cost.trainable import trains_head


def layer_forward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    """Yield the live sets of a layer's forward."""
    norm_inputs = s.query_bytes + s.key_bytes if s.model.qk_norm else 0
    queries = 0 if LINEAR in recomputed else norm_inputs or s.query_bytes
    outputs = 0 if ATTENTION in recomputed else s.query_bytes + s.lse_bytes
    to_save = (queries + s.hidden_bytes + s.gates_bytes + s.output_bytes) * (LINEAR in s.retained)
    to_save += outputs * (ATTENTION in s.retained)
    base = s.rotary_bytes + s.hidden_bytes * (X_IN not in s.retained) - to_save
    inputs = s.query_bytes + 2 * s.key_bytes
    projected = s.normed_bytes + inputs + s.adapter_bytes("v") + product_bytes(s)
    yield "projections", base + projected
    normed = s.query_bytes if s.model.qk_norm else 0
    turned = inputs + s.query_bytes + normed + tiles_bytes(s, 2, width=s.model.hidden_size)
    yield "rotation", base + turned
    base_attention = base + inputs + (queries if s.model.qk_norm else 0) + s.window_kv_bytes
    for name, live in _attention(s).attention_forward(s):
        yield f"attention forward, {name}", base_attention + live
    if s.model.attention_sinks:
        yield "attention sinks", base_attention + s.query_bytes + 3 * s.lse_bytes
    # x_mid, and with norms of outputs the saved output of attention.
    base += queries + outputs + s.hidden_bytes + s.output_bytes * (LINEAR not in recomputed)
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
    if own_linear:
        turned = 2 * s.query_bytes + tiles_bytes(s, 2, width=s.model.num_heads * s.model.head_dim)
        # A CPU norms and rotates one tile at a time.
        turned += s.query_bytes if s.model.qk_norm and not s.threads else 0
        yield "rotation recomputed", base + turned
    queries = s.query_bytes * (own_linear + bool(s.model.qk_norm))
    if own_attention:
        for name, live in _attention(s).attention_forward(s):
            yield f"attention recomputed, {name}", base + queries + s.window_kv_bytes + live
        base += s.window_kv_bytes
    base += queries + (s.query_bytes + s.lse_bytes if own_attention else 0)
    inputs = s.hidden_bytes + s.gates_bytes if own_linear else 0  # x_mid, gate and up
    # With norms of outputs: x_mid beside the output of attention; that of the MLP is free.
    inputs += s.output_bytes + s.output_gradient_bytes
    base -= s.output_bytes * (LINEAR in s.freed)
    for name, live in _mlp(s).mlp_backward(s):
        yield name, base + inputs + live
    freed = (s.gates_bytes + s.hidden_bytes) * (LINEAR in s.freed)
    base += s.hidden_bytes + s.query_bytes - freed  # dx_mid, do
    windowed = s.window_gradient_bytes + (0 if own_attention else s.window_kv_bytes)
    for name, live in _attention(s).attention_backward(s):
        yield f"attention backward, {name}", base + windowed + live
    base -= s.window_kv_bytes if own_attention else 0
    factors = s.adapter_bytes("q", "k", "v")
    if factors:
        # dq, dk and dv, of which dq takes the place of do, dn1, and one u beside all its gradients.
        factors += max(map(s.adapter_bytes, ("q", "k", "v"))) + 2 * s.key_bytes + s.hidden_bytes
        yield "gradients of the inputs' factors", base + factors + mlp_gradient_bytes(s)


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


def _attention(s: TensorSizes) -> ModuleType:
    """Return the module with the live sets of attention on the device."""
    return cpu_attention_live_sets if s.threads else gpu_attention_live_sets
