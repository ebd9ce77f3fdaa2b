"""Live sets of the experts of a layer, beside the tensors of the layer that are live meanwhile.

:mod:`sppo.model.experts` sorts the pairs of a token and an expert of a tile of tokens, so there are
k rows of each token, whatever the routing.

Legend: C tokens of the subsequence on one device, T tokens of a tile, E hidden, F MLP width of an
expert, X experts, k experts per token, R = T k rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.config.model import Experts
from sppo.cost.live_sets.cpu_scratch import product_bytes, tiles_bytes, weight_gradient_bytes
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.cost.parameters import parameter_kind
from sppo.cost.tiles import expert_tile_tokens
from sppo.cost.workload import ACCUMULATION_BYTES

_INDEX_BYTES = 8
_SORTING_BYTES = 18
"""Bytes of a row while rows are sorted: the sorted experts, int16, and indices before and after."""
_SCORES = 3
"""Tensors [C, X] while experts are chosen: logits, scores, scores with a bias."""
_SCORE_GRADIENTS = 7
"""Tensors [C, X] while the gradient of the logits is computed."""


def mlp_forward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live sets of the forward."""
    experts, tile = _experts(s), _Tile(s, _tile_tokens(s))
    choice = _wide_bytes(s, experts.per_token)  # weights of the chosen
    yield "router", s.hidden_bytes + _SCORES * _wide_bytes(s, experts.count) + choice
    # Both projections by tokens.
    inputs = s.hidden_bytes + choice + 2 * s.mlp_bytes
    yield "sorting", inputs + tile.sorting
    yield "expert inputs", inputs + tile.rows_E + tile.rows_F + tile.order + product_bytes(s)
    yield "shared inputs", s.hidden_bytes + s.gates_bytes + choice + product_bytes(s)
    base = s.gates_bytes + choice + s.hidden_bytes  # the output
    yield "expert activation", base + tile.order + 2 * tile.rows_F
    yield "expert output", base + tile.order + tile.rows_F + tile.rows_E + product_bytes(s)
    yield "sum over experts", base + tile.order + 2 * tile.rows_E
    shared = s.shared_bytes + s.adapter_bytes("shared_down") + product_bytes(s)
    yield "shared output", base + s.hidden_bytes + shared


def mlp_backward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live sets of the backward."""
    experts, recomputed = _experts(s), _Tile(s, _tile_tokens(s))
    # Ranks of a shard send the gradients of all their tokens at once.
    tile = _Tile(s, s.tokens) if s.is_shard else recomputed
    # n2, and the weights of the chosen with their gradient.
    base = s.hidden_bytes + 2 * _wide_bytes(s, experts.per_token)
    again = recomputed.order + recomputed.rows_E + recomputed.rows_F
    yield "expert inputs recomputed", base + again + product_bytes(s)
    base += s.hidden_bytes  # dn2
    scratch = max(product_bytes(s), _weight_gradient_bytes(s))
    beside = base + tile.order + tile.rows_E + tile.rows_F  # rows of dy, and dhidden by tokens
    yield "expert activation backward", beside + tile.rows_F + scratch
    width = experts.per_token * experts.mlp_size
    tiles = tiles_bytes(s, 3, width=width) * s.element_bytes // ACCUMULATION_BYTES
    yield "tiles of the expert activation", beside + tiles
    # Rows of n2 and of two of their gradients, and rows of the gradient of a gate or an up.
    yield "expert backward", base + tile.order + 3 * tile.rows_E + tile.rows_F + scratch
    factors = s.adapter_bytes("shared_gate", "shared_up", "shared_down")
    of_shared = 3 * s.shared_bytes + 2 * s.hidden_bytes + 2 * factors
    yield "shared backward", base + of_shared + scratch
    yield "router backward", base + _SCORE_GRADIENTS * _wide_bytes(s, experts.count)


class _Tile:
    """Bytes of tensors with a row for each pair of an expert and a token of a tile.

    Args:
        s: Sizes of the subsequence.
        tokens: Tokens of the tile.
    """

    def __init__(self, s: TensorSizes, tokens: int) -> None:
        experts = _experts(s)
        rows = tokens * experts.per_token
        self.rows_E = s.pooled(rows * s.model.hidden_size * s.element_bytes)
        self.rows_F = s.pooled(rows * experts.mlp_size * s.element_bytes)
        self.sorting = s.pooled(rows * _SORTING_BYTES)
        self.order = 2 * s.pooled(rows * _INDEX_BYTES)
        """Bytes of the pairs in the order of their experts, and of their tokens."""


def _tile_tokens(s: TensorSizes) -> int:
    """Return the tokens that pass through the experts at once."""
    kind = s.workload.hardware.device.kind
    return min(s.tokens, expert_tile_tokens(_experts(s), device=kind))


def _wide_bytes(s: TensorSizes, width: int) -> int:
    """Return the bytes of an fp32 tensor [C, width]."""
    return s.pooled(s.tokens * width * ACCUMULATION_BYTES)


def _weight_gradient_bytes(s: TensorSizes) -> int:
    """Return the scratch of the weight gradient of an expert; 0 on a GPU."""
    if not s.threads:
        return 0
    shapes = (
        shape[1:] for name, shape in s.kind.trained_matrices if parameter_kind(name) == "experts"
    )
    return max((weight_gradient_bytes(s, *shape) for shape in shapes), default=0)


def _experts(s: TensorSizes) -> Experts:
    assert s.model.experts is not None, "a routed layer has experts"
    return s.model.experts
