"""The one written definition of FLOPs, and so of MFU.

Model FLOPs are causal and without recomputation. Forward: 2 FLOPs per weight and token for every
matrix product, the vocabulary projection included (the embedding look-up is none), plus
``4 * N * D`` per visible (query, key) pair and layer: 2 for q.k, 2 for p.v; a causal sequence of S
tokens has S(S+1)/2 pairs. Backward counts twice the forward.
``mfu`` = model FLOPs / (time * peak). ``hfu`` counts executed FLOPs: recomputation, and 2.5 rather
than 2 times the attention forward, which a flash backward executes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sppo.config.model import ModelConfig
from sppo.cost.parameters import layer_shapes

BACKWARD_RATIO = 2.0
FLASH_BACKWARD_RATIO = 2.5
_Tokens = TypeVar("_Tokens", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """Forward FLOPs of one layer."""

    linear_flops: int
    """Per token."""
    attention_flops: int
    """Per visible (query, key) pair."""


def layer_flops(model: ModelConfig) -> LayerFlops:
    """Forward FLOPs of one layer of ``model``."""
    weights = sum(prod(shape) for shape in layer_shapes(model).values() if len(shape) == 2)
    return LayerFlops(2 * weights, 4 * model.num_heads * model.head_dim)


def head_flops(model: ModelConfig) -> int:
    """Forward FLOPs per token of the vocabulary projection."""
    return 2 * model.vocab_size * model.hidden_size


def causal_pairs(start: _Tokens, end: _Tokens, *, window: int | None = None) -> _Tokens:
    """Visible (query, key) pairs of queries ``start..end-1`` that each see keys ``0..query``.

    With a sliding ``window`` a query sees its last ``window`` keys only. Counts, or arrays of them.
    """

    def below(x: _Tokens) -> _Tokens:
        if window is None:
            return x * (x + 1) // 2
        beyond = (x - window) * (x > window)
        near = x - beyond
        return near * (near + 1) // 2 + beyond * window

    return below(end) - below(start)


def forward_flops(model: ModelConfig, *, start: int, end: int) -> int:
    """Model FLOPs of the forward pass of tokens ``start..end-1`` of one sequence, all layers."""
    layer = layer_flops(model)
    linear = (layer.linear_flops * model.num_layers + head_flops(model)) * (end - start)
    pairs = sum(
        causal_pairs(start, end, window=model.window_of(index)) for index in range(model.num_layers)
    )
    return linear + layer.attention_flops * pairs


def step_flops(model: ModelConfig, *, length: int, sequences: int) -> int:
    """Model FLOPs of one training step: forward and backward of ``sequences`` sequences."""
    return int((1 + BACKWARD_RATIO) * forward_flops(model, start=0, end=length) * sequences)


def partition_costs(model: ModelConfig) -> tuple[float, float]:
    """(a, b) of :mod:`sppo.planning.partition`: FLOPs per token and per pair, all layers.

    A sliding window makes attention nearly linear in the prefix, so its pairs count per token.
    """
    layer = layer_flops(model)
    linear = float(layer.linear_flops * model.num_layers + head_flops(model))
    quadratic = 0.0
    for index in range(model.num_layers):
        window = model.window_of(index)
        if window is None:
            quadratic += layer.attention_flops
        else:
            linear += layer.attention_flops * window
    return linear, quadratic


def executed_step_flops(
    model: ModelConfig,
    *,
    boundaries: Sequence[int],
    sequences: int,
    linear_recomputed: Sequence[float],
    attention_recomputed: Sequence[float],
) -> int:
    """FLOPs that a step really executes under an activation policy (the numerator of ``hfu``).

    K and V stay in their store and are never recomputed.

    Args:
        model: its shape.
        boundaries: cuts of a sequence.
        sequences: sequences of the step.
        linear_recomputed: fraction of each subsequence whose linear class is recomputed.
        attention_recomputed: fraction of each subsequence that recomputes attention.
    """
    layer = layer_flops(model)
    spans = list(zip(boundaries, boundaries[1:], strict=False))
    attention = [layer.attention_flops * _visible_pairs(model, span) for span in spans]
    linear = forward_flops(model, start=0, end=boundaries[-1]) - sum(attention)
    recomputed = sum(
        fraction * recomputed_linear_flops(model) * model.num_layers * (end - start)
        for fraction, (start, end) in zip(linear_recomputed, spans, strict=True)
    )
    recomputed_attention = sum(
        fraction * flops for fraction, flops in zip(attention_recomputed, attention, strict=True)
    )
    backward = BACKWARD_RATIO * linear + FLASH_BACKWARD_RATIO * sum(attention)
    return int((linear + sum(attention) + backward + recomputed + recomputed_attention) * sequences)


def _visible_pairs(model: ModelConfig, span: tuple[int, int]) -> int:
    """Visible pairs of a subsequence in all layers."""
    start, end = span
    return sum(
        causal_pairs(start, end, window=model.window_of(index)) for index in range(model.num_layers)
    )


def recomputed_linear_names(model: ModelConfig) -> tuple[str, ...]:
    """Projections that recompute the linear class in backward."""
    gate, k = ("gate",) if model.gated else (), ("k",) if model.qk_norm else ()
    return ("q", "o", "up", *gate, *k)


def recomputed_linear_flops(model: ModelConfig) -> int:
    """Per token and layer: what the products of :func:`recomputed_linear_names` cost."""
    shapes = layer_shapes(model)
    return 2 * sum(prod(shapes[f"{name}.weight"]) for name in recomputed_linear_names(model))
