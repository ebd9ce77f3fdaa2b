"""Live tensors of a layer and of the loss on a GPU, where a tensor goes with its last reference.

What stays in device memory from forward to backward, the *retained* classes, counts as held for as
long as the unit's forward or backward runs (:mod:`sppo.cost.memory.units_in_flight`). So in a
forward the live bytes below are less by what the layer has yet to save, and in a backward by what
it has freed already. Chains of element-wise operations are one kernel each and take nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.activations.tensor_classes import ATTENTION, LINEAR, X_IN
from sppo.cost.live_sets.attention_live_sets import attention_backward, attention_forward
from sppo.cost.live_sets.tensor_sizes import TensorSizes
from sppo.cost.logits_tile import tile_tokens

Named = tuple[str, int]
"""A point of a pass and its live bytes."""


def layer_forward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[Named]:
    """Yield the live sets of a layer's forward."""
    inputs = s.query + 2 * s.key
    norm_inputs = s.query + s.key if s.model.qk_norm else 0
    queries = 0 if LINEAR in recomputed else norm_inputs or s.query
    outputs = 0 if ATTENTION in recomputed else s.query + s.lse
    to_save = (queries + s.hidden + s.gates) * (LINEAR in s.retained)
    to_save += outputs * (ATTENTION in s.retained)
    base = s.rotary + s.hidden * (X_IN not in s.retained) - to_save
    yield "projections", base + s.hidden + inputs
    yield "rotation", base + inputs + s.query + (s.query if s.model.qk_norm else 0)
    base_attention = base + inputs + (0 if LINEAR in recomputed else norm_inputs)
    for name, live in attention_forward(s):
        yield f"attention forward, {name}", base_attention + live
    base += queries + outputs + s.hidden  # x_mid
    yield "MLP inputs", base + s.hidden + s.gates
    yield "MLP output", base + s.gates + s.mlp + s.hidden


def layer_backward(
    s: TensorSizes, *, recomputed: frozenset[int], input_every: int, layers: int
) -> Iterator[Named]:
    """Yield the live sets of a layer's backward."""
    own_linear, own_attention = LINEAR in recomputed, ATTENTION in recomputed
    interval = 1 if own_attention else min(input_every, layers)
    below = s.hidden + (s.hidden + s.gates if own_linear else 0)
    base = s.rotary + (interval - 1) * below + s.hidden  # n1
    # The gradient that comes from above; the last layer's was saved, and another layer's comes when
    # the input of the layer above it has gone.
    if layers > interval and X_IN not in s.freed:
        base += s.hidden
    if own_linear:
        yield "rotation recomputed", base + (3 if s.model.qk_norm else 2) * s.query
    queries = s.query * (own_linear + s.model.qk_norm)
    if own_attention:
        for name, live in attention_forward(s):
            yield f"attention recomputed, {name}", base + queries + live
    base += queries + (s.query + s.lse if own_attention else 0)
    inner = s.hidden + s.mlp + (s.hidden + s.gates if own_linear else 0)  # n2, dhidden, recomputed
    yield "MLP backward", base + inner + s.hidden  # dn2
    freed = (s.gates + s.hidden) * (LINEAR in s.freed)
    base += s.hidden + s.query - freed  # dx_mid, do
    for name, live in attention_backward(s):
        yield f"attention backward, {name}", base + live


def loss(s: TensorSizes) -> Iterator[Named]:
    """Yield the live sets of the final norm, the head and the loss, both ways in one.

    The gradient that they end in is saved, and counts as held from the unit's begin.
    """
    tokens = tile_tokens(s.model.vocab_size, element_bytes=s.element, device=s.device)
    logits = min(s.tokens, tokens) * s.model.vocab_size * s.element
    yield "logits", s.rotary + 2 * s.hidden + logits
    yield "final norm", s.rotary + 3 * s.hidden
