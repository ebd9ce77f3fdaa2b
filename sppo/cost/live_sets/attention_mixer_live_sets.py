"""Live sets of attention as the token mixer of a layer, beside the other tensors of the layer.

They follow :mod:`sppo.model.attention_mixer`, and count the norm of the layer's input in forward
alone: backward has it throughout.

Legend: C tokens of the subsequence on one device, Q = N D query width, K D key width.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.live_sets import cpu_attention_live_sets, gpu_attention_live_sets
from sppo.cost.live_sets.cpu_scratch import mlp_gradient_bytes, product_bytes, tiles_bytes
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes


def saved_bytes(s: TensorSizes) -> tuple[int, int]:
    """Return the bytes of what the mixer may save: of the linear class, and of attention."""
    return _saved_queries(s) + s.attention_gate_bytes, s.query_bytes + s.lse_bytes


def mixer_forward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    """Yield the live sets of the forward."""
    inputs = s.query_bytes + 2 * s.key_bytes + s.attention_gate_bytes
    yield "projections", s.normed_bytes + inputs + s.adapter_bytes("v") + product_bytes(s)
    normed = s.query_bytes if s.model.qk_norm else 0
    turned = s.query_bytes + normed + tiles_bytes(s, 2, width=s.model.hidden_size)
    yield "rotation", inputs + turned
    keeps_norm_inputs = s.model.qk_norm and LINEAR not in recomputed
    inputs += s.window_kv_bytes + (_saved_queries(s) if keeps_norm_inputs else 0)
    for name, live in _attention(s).attention_forward(s):
        yield f"attention forward, {name}", inputs + live
    if s.model.attention_sinks:
        yield "attention sinks", inputs + s.query_bytes + 3 * s.lse_bytes


def mixer_recomputation(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    """Yield the live sets of what backward recomputes before that of the MLP."""
    if LINEAR in recomputed:
        turned = 2 * s.query_bytes + tiles_bytes(s, 2, width=s.model.num_heads * s.model.head_dim)
        # A CPU norms and rotates one tile at a time.
        turned += s.query_bytes if s.model.qk_norm and not s.threads else 0
        yield "rotation recomputed", turned
    if ATTENTION in recomputed:
        beside = _recomputed_queries(s, recomputed=recomputed) + s.window_kv_bytes
        for name, live in _attention(s).attention_forward(s):
            yield f"attention recomputed, {name}", beside + live


def recomputed_bytes(s: TensorSizes, *, recomputed: frozenset[int]) -> int:
    """Return the bytes of what is recomputed before the MLP's backward, and live until its own."""
    outputs = s.query_bytes + s.lse_bytes + s.window_kv_bytes
    gate = s.attention_gate_bytes * (LINEAR in recomputed)
    queries = _recomputed_queries(s, recomputed=recomputed)
    return queries + gate + outputs * (ATTENTION in recomputed)


def mixer_backward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    """Yield the live sets of the backward, beside what was recomputed before."""
    own_attention = ATTENTION in recomputed
    windowed = s.window_gradient_bytes + (0 if own_attention else s.window_kv_bytes)
    for name, live in _attention(s).attention_backward(s):
        yield f"attention backward, {name}", s.query_bytes + windowed + live
    factors = s.adapter_bytes("q", "k", "v")
    if factors:
        # dq, dk and dv, of which dq takes the place of do, dn1, and one u beside all its gradients.
        factors += max(map(s.adapter_bytes, ("q", "k", "v"))) + 2 * s.key_bytes + s.hidden_bytes
        factors -= s.window_kv_bytes if own_attention else 0
        scratch = mlp_gradient_bytes(s)
        yield "gradients of the inputs' factors", s.query_bytes + factors + scratch


def _saved_queries(s: TensorSizes) -> int:
    """Return the bytes of saved queries, and of saved keys if these are saved before their norm."""
    return s.query_bytes + (s.key_bytes if s.model.qk_norm else 0)


def _recomputed_queries(s: TensorSizes, *, recomputed: frozenset[int]) -> int:
    """Return the bytes of queries in backward, before and after their norm, beside saved ones."""
    return s.query_bytes * ((LINEAR in recomputed) + bool(s.model.qk_norm))


def _attention(s: TensorSizes) -> ModuleType:
    """Return the module with the live sets of attention on the device."""
    return cpu_attention_live_sets if s.threads else gpu_attention_live_sets
