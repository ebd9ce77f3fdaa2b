"""Working set: exact memory of the running subsequence, without saved tensors.

Every tensor of :mod:`sppo.model.layer`, :mod:`sppo.kernels` and the head has a name and a size. A
live set of a pass is the tensors that are live at a time, and the working set is the largest live
set. On a CPU, chains of element-wise operations count as tiles (:mod:`sppo.kernels.row_tiles`), and
torch's kernels with their observed scratch; for a GPU see
:mod:`sppo.cost.live_sets.gpu_live_sets`. Saved tensors are not counted: they have a bucket of their
own, from which backward reads them in place.

Legend: C tokens of the subsequence on one device, E hidden, Q = N D query width, K D key width, F
MLP width, V vocabulary, e element bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap

from sppo.activations.tensor_classes import ATTENTION, LINEAR
from sppo.cost.layer import ACCUMULATION_BYTES, Workload
from sppo.cost.live_sets import gpu_live_sets
from sppo.cost.live_sets.attention_live_sets import attention_backward, attention_forward
from sppo.cost.live_sets.cpu_scratch import (
    layer_weight_gradient_bytes,
    product_bytes,
    tiles_bytes,
    weight_gradient_bytes,
)
from sppo.cost.live_sets.tensor_sizes import TensorSizes, tensor_sizes
from sppo.cost.logits_tile import tile_tokens


@dataclass(frozen=True, slots=True)
class LiveSet:
    """Name of a point of a pass, and the bytes of the tensors that are live at this point."""

    name: str
    live_bytes: int


@lru_cache(maxsize=1 << 15)
def working_sets(
    workload: Workload,
    *,
    tokens: int,
    prefix: int,
    recomputed: frozenset[int],
    retained: frozenset[int] = frozenset(),
    input_every: int = 1,
    layers: int,
    defers: bool = False,
) -> tuple[LiveSet, LiveSet]:
    """Return the largest live set of a layer's forward, and of its backward.

    Args:
        workload: Model, machine, dtype and sequence parallelism.
        tokens: Tokens of the subsequence on one device.
        prefix: Tokens of the sequence before the subsequence.
        recomputed: Tensor classes that backward recomputes.
        retained: Tensor classes of which every row stays on a GPU.
        input_every: Layers from one saved input to the next.
        layers: Layers of the stage.
        defers: Whether weight halves of backwards are deferred.
    """
    sizes = tensor_sizes(workload, tokens, prefix=prefix, retained=retained, defers=defers)
    forward = _forward(sizes, recomputed=recomputed)
    backward = _backward(sizes, recomputed=recomputed, input_every=input_every, layers=layers)
    return _largest(forward), _largest(backward)


def most_working_set(
    workload: Workload, *, tokens: int, prefix: int, input_every: int = 1, layers: int
) -> LiveSet:
    """Return an upper bound of :func:`working_sets` for any recomputed classes.

    A forward needs the most memory if all is saved, since saved tensors are copied only when the
    layer ends; a backward if all is recomputed, or if layer inputs and the linear class are.
    """
    sizes = tensor_sizes(workload, tokens, prefix=prefix)
    live_sets = [*_forward(sizes, recomputed=frozenset())]
    for recomputed in (frozenset((ATTENTION, LINEAR)), frozenset((LINEAR,)))[: min(2, input_every)]:
        live_sets += _backward(sizes, recomputed=recomputed, input_every=input_every, layers=layers)
    return _largest(live_sets)


def forward_working_set(workload: Workload, *, tokens: int) -> LiveSet:
    """Return the largest live set of a layer's forward that saves nothing."""
    sizes = tensor_sizes(workload, tokens)
    return _largest(_forward(sizes, recomputed=frozenset((ATTENTION, LINEAR))))


def loss_working_set(workload: Workload, *, tokens: int) -> LiveSet:
    """Return the largest live set of the final norm, the head and the loss, with their backward."""
    return _largest(_loss(tensor_sizes(workload, tokens)))


def _largest(live_sets: Iterable[LiveSet]) -> LiveSet:
    return max(live_sets, key=lambda live_set: live_set.live_bytes)


def _forward(s: TensorSizes, *, recomputed: frozenset[int]) -> Iterator[LiveSet]:
    if not s.threads:
        yield from starmap(LiveSet, gpu_live_sets.layer_forward(s, recomputed=recomputed))
        return
    retained_queries = (
        0 if LINEAR in recomputed else s.query_bytes + (s.key_bytes if s.model.qk_norm else 0)
    )
    retained_outputs = 0 if ATTENTION in recomputed else s.query_bytes + s.lse_bytes
    base = s.rotary_bytes + s.hidden_bytes
    inputs = s.query_bytes + 2 * s.key_bytes
    yield LiveSet("projections", base + s.hidden_bytes + inputs + product_bytes(s))
    normed = 1 if s.model.qk_norm else 0
    turned = (
        base + inputs + (1 + normed) * s.query_bytes + tiles_bytes(s, 2, width=s.model.hidden_size)
    )
    yield LiveSet("rotation", turned)
    base_attention = base + inputs + (retained_queries if s.model.qk_norm else 0)
    for name, live in attention_forward(s):
        yield LiveSet(f"attention forward, {name}", base_attention + live)
    base += retained_queries + retained_outputs + s.hidden_bytes
    yield LiveSet("MLP inputs", base + s.hidden_bytes + s.gates_bytes + product_bytes(s))
    yield LiveSet(
        "MLP output", base + s.gates_bytes + s.mlp_bytes + s.hidden_bytes + product_bytes(s)
    )


def _backward(
    s: TensorSizes, *, recomputed: frozenset[int], input_every: int, layers: int
) -> Iterator[LiveSet]:
    if not s.threads:
        live_sets = gpu_live_sets.layer_backward(
            s, recomputed=recomputed, input_every=input_every, layers=layers
        )
        yield from starmap(LiveSet, live_sets)
        return
    own_linear, own_attention = LINEAR in recomputed, ATTENTION in recomputed
    interval = 1 if own_attention else min(input_every, layers)
    base = s.rotary_bytes + s.hidden_bytes  # n1
    base += _waiting(s, recomputed=recomputed, others=interval - 1)
    if layers > interval:  # Gradient from the layer above; that of the last layer is saved.
        base += s.hidden_bytes
    queries = s.query_bytes if own_linear or s.model.qk_norm else 0
    if own_linear:
        tiles = tiles_bytes(s, 2, width=_query_width(s))
        yield LiveSet("rotation recomputed", base + 2 * s.query_bytes + tiles)
    queries += s.query_bytes if own_linear and s.model.qk_norm else 0
    if own_attention:
        for name, live in attention_forward(s):
            yield LiveSet(f"attention recomputed, {name}", base + queries + live)
    outputs = s.query_bytes + s.lse_bytes if own_attention else 0
    base += queries + outputs
    inner = s.hidden_bytes + s.mlp_bytes  # n2, dhidden
    inner += s.hidden_bytes + s.gates_bytes if own_linear else 0  # x_mid, gate and up
    tiles = tiles_bytes(s, 3, width=s.model.mlp_size) * s.element_bytes // ACCUMULATION_BYTES
    yield LiveSet("activation backward", base + inner + tiles)
    dn2_and_tile = s.hidden_bytes + layer_weight_gradient_bytes(s, "down")
    yield LiveSet("MLP backward", base + inner + dn2_and_tile)
    base += 2 * s.hidden_bytes  # dx_mid, do
    base += s.query_bytes - s.hidden_bytes
    for name, live in attention_backward(s):
        yield LiveSet(f"attention backward, {name}", base + live)


def _waiting(s: TensorSizes, *, recomputed: frozenset[int], others: int) -> int:
    """Return the bytes of recomputed tensors of `others` layers that wait for their backward."""
    return others * (
        s.hidden_bytes + (s.hidden_bytes + s.gates_bytes if LINEAR in recomputed else 0)
    )


def _query_width(s: TensorSizes) -> int:
    return s.model.num_heads * s.model.head_dim


def _loss(s: TensorSizes) -> Iterator[LiveSet]:
    if not s.threads:
        yield from starmap(LiveSet, gpu_live_sets.loss(s))
        return
    vocabulary, hidden = s.model.vocab_size, s.model.hidden_size
    of_tile = tile_tokens(vocabulary, element_bytes=s.element_bytes, device=s.device)
    logits = min(s.tokens, of_tile) * vocabulary * s.element_bytes
    base = 3 * s.hidden_bytes  # Output of the last layer, its norm, and the norm's gradient.
    if s.is_half:
        yield LiveSet("logits", base + logits + tiles_bytes(s, 1, width=vocabulary))
    yield LiveSet("logit gradients", base + logits + weight_gradient_bytes(s, vocabulary, hidden))
    yield LiveSet(
        "final norm", base + s.hidden_bytes + tiles_bytes(s, 5, width=s.model.hidden_size)
    )
