"""The one written definition of FLOPs, and so of MFU.

Model FLOPs are causal and without recomputation. Forward: 2 FLOPs per weight and token for every
matrix product, the vocabulary projection included (the embedding look-up is none), plus
``4 * N * D`` per visible (query, key) pair and layer: 2 for q.k, 2 for p.v; a causal sequence of S
tokens has S(S+1)/2 pairs. Backward counts twice the forward.
``mfu`` = model FLOPs / (time * peak). ``hfu`` counts executed FLOPs: recomputation, and 2.5 rather
than 2 times the attention forward, which a flash backward executes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sppo.config.model import ModelConfig
from sppo.cost.packed_sequence import SampleParts
from sppo.cost.parameters import layer_shapes
from sppo.hardware.rates import Floats

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


def sample_flops(model: ModelConfig, lengths: Iterable[int]) -> int:
    """Model FLOPs of forward and backward of samples that each see themselves alone."""
    return sum(step_flops(model, length=length, sequences=1) for length in lengths)


def partition_costs(model: ModelConfig) -> tuple[float, float]:
    """Return (a, b) of :mod:`sppo.planning.partition`: FLOPs per token and per pair, all layers.

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
    parts: SampleParts,
    *,
    linear_recomputed: Floats,
    attention_recomputed: Floats,
) -> int:
    """FLOPs that a step really executes under an activation policy (the numerator of ``hfu``).

    K and V stay in their store and are never recomputed.

    Args:
        model: its shape.
        parts: of the samples in each subsequence of the step.
        linear_recomputed: fraction of each subsequence whose linear class is recomputed.
        attention_recomputed: fraction of each subsequence that recomputes attention.
    """
    layer, tokens = layer_flops(model), parts.tokens
    begins, ends = parts.begins.astype(np.int64), parts.ends.astype(np.int64)
    pairs = np.zeros_like(begins)
    for index in range(model.num_layers):
        pairs += causal_pairs(begins, ends, window=model.window_of(index))
    attention = layer.attention_flops * parts.by_subsequence(pairs.astype(np.float64))
    linear = (layer.linear_flops * model.num_layers + head_flops(model)) * float(tokens.sum())
    again = linear_recomputed * tokens * recomputed_linear_flops(model) * model.num_layers
    forward = linear + attention.sum()
    backward = BACKWARD_RATIO * linear + FLASH_BACKWARD_RATIO * attention.sum()
    return int(forward + backward + again.sum() + (attention_recomputed * attention).sum())


def recomputed_linear_names(model: ModelConfig) -> tuple[str, ...]:
    """Projections that recompute the linear class in backward."""
    gate, k = ("gate",) if model.gated else (), ("k",) if model.qk_norm else ()
    return ("q", "o", "up", *gate, *k)


def recomputed_linear_flops(model: ModelConfig) -> int:
    """Per token and layer: what the products of :func:`recomputed_linear_names` cost."""
    shapes = layer_shapes(model)
    return 2 * sum(prod(shapes[f"{name}.weight"]) for name in recomputed_linear_names(model))
