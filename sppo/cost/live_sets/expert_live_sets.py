"""Live sets of the experts of a layer, beside the tensors of the layer that are live meanwhile.

:mod:`sppo.model.experts` sorts the pairs of a token and an expert, so there are k rows of each
token, whatever the routing.

Legend: C tokens of the subsequence on one device, E hidden, F MLP width of an expert, X experts, k
experts per token, R = C k rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo.config.model import Experts
from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.cost.live_sets.cpu_scratch import product_bytes, weight_gradient_bytes
from sppo.cost.live_sets.tensor_sizes import LiveSet, TensorSizes
from sppo.cost.parameters import parameter_kind

_INDEX_BYTES = 8
_SORTING_BYTES = 18
"""Bytes of a row while rows are sorted: the sorted experts, int16, and indices before and after."""
_SCORES = 3
"""Tensors [C, X] while experts are chosen: logits, scores, scores with a bias."""
_SCORE_GRADIENTS = 7
"""Tensors [C, X] while the gradient of the logits is computed."""


def mlp_forward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live sets of the forward."""
    experts = _experts(s)
    rows_E, rows_F, order = _row_bytes(s, s.model.hidden_size), s.mlp_bytes, _order_bytes(s)
    choice = _wide_bytes(s, experts.per_token)  # weights of the chosen
    yield "router", s.hidden_bytes + _SCORES * _wide_bytes(s, experts.count) + choice
    yield "sorting", s.hidden_bytes + choice + _row_bytes(s, 1, each=_SORTING_BYTES)
    # Both projections by tokens, and the rows of one.
    of_experts = rows_E + 3 * rows_F + order + choice
    yield "expert inputs", s.hidden_bytes + of_experts + product_bytes(s)
    yield "shared inputs", s.hidden_bytes + s.gates_bytes + choice + product_bytes(s)
    base = s.gates_bytes + order + choice
    yield "expert activation", base + 2 * rows_F
    yield "expert output", base + rows_F + rows_E + product_bytes(s)
    yield "sum over experts", base + 2 * rows_E + s.hidden_bytes
    shared = s.shared_bytes + s.adapter_bytes("shared_down") + product_bytes(s)
    yield "shared output", base + 2 * s.hidden_bytes + shared


def mlp_backward(s: TensorSizes) -> Iterator[LiveSet]:
    """Yield the live sets of the backward."""
    experts = _experts(s)
    rows_E, rows_F, order = _row_bytes(s, s.model.hidden_size), s.mlp_bytes, _order_bytes(s)
    # n2, and the weights of the chosen with their gradient.
    base = s.hidden_bytes + 2 * _wide_bytes(s, experts.per_token) + order
    scratch = max(product_bytes(s), _weight_gradient_bytes(s))
    yield "expert inputs recomputed", base + rows_E + rows_F + product_bytes(s)
    yield "expert activation backward", base + rows_E + 2 * rows_F + scratch
    # Rows of n2 and of two of their gradients, and rows of the gradient of a gate or an up.
    yield "expert backward", base + 3 * rows_E + rows_F + scratch
    yield "sum of gradients over experts", base + 2 * rows_E + s.hidden_bytes
    factors = s.adapter_bytes("shared_gate", "shared_up", "shared_down")
    of_shared = 3 * s.shared_bytes + 2 * s.hidden_bytes + 2 * factors
    yield "shared backward", base + s.hidden_bytes + of_shared + scratch
    scores = _SCORE_GRADIENTS * _wide_bytes(s, experts.count)
    yield "router backward", base + s.hidden_bytes + scores


def _row_bytes(s: TensorSizes, width: int, *, each: int | None = None) -> int:
    """Return the bytes of a tensor with a row for each pair of a token and an expert."""
    return s.pooled(s.tokens * _experts(s).per_token * width * (each or s.element_bytes))


def _wide_bytes(s: TensorSizes, width: int) -> int:
    """Return the bytes of an fp32 tensor [C, width]."""
    return s.pooled(s.tokens * width * ACCUMULATION_BYTES)


def _order_bytes(s: TensorSizes) -> int:
    """Return the bytes of the pairs in the order of their experts, and of their tokens."""
    return 2 * _row_bytes(s, 1, each=_INDEX_BYTES)


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
