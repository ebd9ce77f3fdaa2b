"""Live sets of a layer on a rank that runs an MSP shard, besides those of a subsequence as long.

* In forward, the keys and values of all shards are gathered. With Ulysses, the outputs of the runs
  of tokens of its ranks are joined.
* In backward, every rank forms gradients of the layer's K and V for the prefix and the unit. fp32
  gradients of parameters are being sent to the owner: at most two, while the next one is computed,
  or while the owner makes room for the sum of the next one.
* A borrower holds the weights of the layer and of the next one, and K and V of the layer; in
  forward those of the next layer, too, which are sent with the weights.

Legend: see :mod:`sppo.cost.live_sets.layer_live_sets`; T tokens up to the end of the unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from sppo.cost.live_sets.cpu_scratch import mlp_gradient_bytes, product_bytes
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.cost.trainable import LORA_A, LORA_B
from sppo.cost.workload import ACCUMULATION_BYTES

_MLP = {
    "MLP backward": ("down", "up", "gate"),
    "expert backward": ("expert_down", "expert_up", "expert_gate"),
    "shared backward": ("shared_down", "shared_up", "shared_gate"),
    "router backward": ("shared_switch", "router"),
}
"""Projections whose weight gradients are computed at a point of the MLP's backward, in order."""
BORROWED_LAYERS = 2
"""Layers whose weights a borrower holds at once: one in use, and the next one being received."""
MOST_GRADIENTS_SENT = 2
"""Most parameters whose gradients are being sent to the owner at once."""


@dataclass(frozen=True, slots=True)
class ShardSizes:
    """Sizes of an MSP shard, in addition to its own tokens.

    Attributes:
        unit_tokens: Tokens of the unit.
        end_tokens: Tokens of the sequence up to the end of the unit (T).
        borrowed_layers: Layers whose weights the rank holds at once; 0 on the owner of the stage.
    """

    unit_tokens: int
    end_tokens: int
    borrowed_layers: int

    def num_keys(self, s: TensorSizes) -> int:
        """Return the number of keys that the unit's queries see."""
        window = s.kind.window
        if window is None:
            return self.end_tokens
        return min(self.end_tokens, self.unit_tokens + window - 1)

    def kv_bytes(self, s: TensorSizes) -> int:
        """Return the bytes of K and V of one layer that the unit's queries see."""
        return 2 * s.pooled(self.num_keys(s) * s.key_row_bytes)

    def weights_bytes(self, s: TensorSizes) -> int:
        """Return the bytes of borrowed weights."""
        layer = sum(s.pooled(prod(shape) * s.element_bytes) for _, shape in s.kind.shapes)
        return self.borrowed_layers * layer


def shard_forward(
    s: TensorSizes, shard: ShardSizes, live_sets: Iterable[LiveSet]
) -> Iterator[LiveSet]:
    """Yield the live sets of a shard's forward in a layer.

    Args:
        s: Sizes of the tensors of the shard's tokens.
        shard: Further sizes of the shard.
        live_sets: Live sets of a subsequence of as many tokens.
    """
    has_prefix = shard.end_tokens > shard.unit_tokens
    buffers = min(1, shard.borrowed_layers) if not has_prefix else shard.borrowed_layers
    beside = shard.weights_bytes(s) + buffers * shard.kv_bytes(s)
    inputs = 0
    for name, live in live_sets:
        if name == "projections":
            inputs = live - s.normed_bytes - product_bytes(s) + beside
        yield name, live + beside
    # Instead of the normed input: parts of V of the other shards, and K and V of the unit.
    gathered = (3 * shard.unit_tokens - s.tokens) * s.key_row_bytes
    yield "keys and values gathered", inputs + gathered
    if s.rows > s.tokens:
        outputs = 2 * (s.query_bytes + s.lse_bytes)
        yield "outputs of runs joined", inputs + outputs


def shard_backward(
    s: TensorSizes, shard: ShardSizes, live_sets: Iterable[LiveSet]
) -> Iterator[LiveSet]:
    """Yield the live sets of a shard's backward in a layer.

    Args:
        s: Sizes of the tensors of the shard's tokens.
        shard: Further sizes of the shard.
        live_sets: Live sets of a subsequence of as many tokens.
    """
    beside = shard.weights_bytes(s) + min(1, shard.borrowed_layers) * shard.kv_bytes(s)
    row_bytes = s.key_row_bytes // s.element_bytes * ACCUMULATION_BYTES
    # In a layer with a window, the owner also has the sums of all shards.
    copies = 1 + (s.kind.window is not None and not shard.borrowed_layers)
    key_gradients = copies * 2 * s.pooled(shard.num_keys(s) * row_bytes) - s.window_gradient_bytes
    for name, live in live_sets:
        more = 0
        if name in _MLP:
            more = _mlp_gradients(s, name, is_owner=not shard.borrowed_layers)
        elif name.startswith("attention backward"):
            more = key_gradients + sum(_before_attention(s)[-MOST_GRADIENTS_SENT:])
        yield name, live + beside + more


def _mlp_gradients(s: TensorSizes, point: str, *, is_owner: bool) -> int:
    """Return the most bytes of gradients at a point of the MLP's backward, less free scratch.

    The owner makes room for a sum when it has computed its own part, and needs no scratch then.
    """
    points = [*_MLP]
    before = [name for one in points[: points.index(point)] for name in _MLP[one]]
    begin, mlp = len(_sums(s, *before)), _sums(s, *before, *_MLP[point])
    scratch = mlp_gradient_bytes(s)
    found = []
    for index, own in [*enumerate(mlp)][begin:]:
        sent = sum(mlp[max(0, index - MOST_GRADIENTS_SENT) : index])
        found.append(sent + (max(own, scratch) - scratch if is_owner else own))
    return max(found, default=0)


def _before_attention(s: TensorSizes) -> Sequence[int]:
    """Return the bytes of the gradients of parameters sent before attention's backward."""
    mlp = (name for names in _MLP.values() for name in names)
    norms = (*_sums(s, "mlp_norm")[::-1], *_sums(s, "attention_post_norm")[::-1])
    return (*_sums(s, *mlp), *norms, *_sums(s, "o", "sinks"))


def _sums(s: TensorSizes, *layers: str) -> tuple[int, ...]:
    """Return the bytes of the gradients of the parameters of projections and norms that train.

    They are in the order in which backward computes them.
    """
    shapes = dict(s.kind.trained_shapes)
    parts = ("weight", "bias", LORA_B, LORA_A)
    names = [f"{layer}.{part}" for layer in layers for part in parts]
    return tuple(
        s.pooled(prod(shapes[name]) * ACCUMULATION_BYTES) for name in names if name in shapes
    )
