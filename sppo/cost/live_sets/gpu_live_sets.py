"""Live sets of a layer and of the loss on a GPU, where a tensor is freed with its last reference.

*Retained* classes, which stay in device memory from forward to backward, count as held during the
whole forward and backward of their unit (:mod:`sppo.cost.memory.units_in_flight`). So the live
bytes here are reduced, in a forward by tensors that the layer has yet to save, in a backward by
tensors that it has already freed. Chains of element-wise operations are one kernel each and take no
memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.activations.tensor_classes import ATTENTION, LINEAR, X_IN
from sppo.cost.live_sets.gpu_attention_live_sets import attention_backward, attention_forward
from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.logits_tile import tile_tokens

Named = tuple[str, int]
"""Name of a point of a pass, and live bytes at this point."""


def layer_forward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[Named]:
    """Yield the live sets of a layer's forward."""
    inputs = s.query_bytes + 2 * s.key_bytes
    norm_inputs = s.query_bytes + s.key_bytes if s.model.qk_norm else 0
    queries = 0 if LINEAR in recomputed else norm_inputs or s.query_bytes
    outputs = 0 if ATTENTION in recomputed else s.query_bytes + s.lse_bytes
    to_save = (queries + s.hidden_bytes + s.gates_bytes) * (LINEAR in s.retained)
    to_save += outputs * (ATTENTION in s.retained)
    base = s.rotary_bytes + s.hidden_bytes * (X_IN not in s.retained) - to_save
    yield "projections", base + s.hidden_bytes + inputs
    yield "rotation", base + inputs + s.query_bytes + (s.query_bytes if s.model.qk_norm else 0)
    base_attention = base + inputs + (0 if LINEAR in recomputed else norm_inputs)
    for name, live in attention_forward(s):
        yield f"attention forward, {name}", base_attention + live
    base += queries + outputs + s.hidden_bytes  # x_mid
    yield "MLP inputs", base + s.hidden_bytes + s.gates_bytes
    yield "MLP output", base + s.gates_bytes + s.mlp_bytes + s.hidden_bytes


def layer_backward(
    s: TensorSizes, *, recomputed: frozenset[int], input_every: int, layers: int
) -> Iterator[Named]:
    """Yield the live sets of a layer's backward."""
    own_linear, own_attention = LINEAR in recomputed, ATTENTION in recomputed
    interval = 1 if own_attention else min(input_every, layers)
    below = s.hidden_bytes + (s.hidden_bytes + s.gates_bytes if own_linear else 0)
    base = s.rotary_bytes + (interval - 1) * below + s.hidden_bytes  # n1
    # Gradient from the layer above: the last layer's is saved, and another's takes the place of the
    # freed input of the layer above.
    if layers > interval and X_IN not in s.freed:
        base += s.hidden_bytes
    if own_linear:
        yield "rotation recomputed", base + (3 if s.model.qk_norm else 2) * s.query_bytes
    queries = s.query_bytes * (own_linear + s.model.qk_norm)
    if own_attention:
        for name, live in attention_forward(s):
            yield f"attention recomputed, {name}", base + queries + live
    base += queries + (s.query_bytes + s.lse_bytes if own_attention else 0)
    inner = s.hidden_bytes + s.mlp_bytes  # n2, dhidden
    inner += s.hidden_bytes + s.gates_bytes if own_linear else 0  # recomputed
    yield "MLP backward", base + inner + s.hidden_bytes  # dn2
    freed = (s.gates_bytes + s.hidden_bytes) * (LINEAR in s.freed)
    base += s.hidden_bytes + s.query_bytes - freed  # dx_mid, do
    for name, live in attention_backward(s):
        yield f"attention backward, {name}", base + live


def loss(s: TensorSizes) -> Iterator[Named]:
    """Yield the live sets of the final norm, the head and the loss, forward and backward in one.

    The resulting gradient of the last layer's output is saved and counts as held from the begin of
    the unit.
    """
    tokens = tile_tokens(s.model.vocab_size, element_bytes=s.element_bytes, device=s.device)
    logits = min(s.tokens, tokens) * s.model.vocab_size * s.element_bytes
    yield "logits", s.rotary_bytes + 2 * s.hidden_bytes + logits
    yield "final norm", s.rotary_bytes + 3 * s.hidden_bytes
