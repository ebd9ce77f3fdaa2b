"""Definition of model FLOPs and executed FLOPs, and of MFU and HFU.

Model FLOPs are causal and without recomputation. Forward: 2 FLOPs per weight and token for every
matrix product, including the vocabulary projection but not the embedding look-up, plus
``4 * N * D`` per visible (query, key) pair and layer: 2 for q.k, 2 for p.v; a causal sequence of S
tokens has S(S+1)/2 pairs. Backward counts twice the forward. Tokens whose label does not count have
no FLOPs of the vocabulary projection, which does not compute them.
``mfu`` = model FLOPs / (time * peak). ``hfu`` uses executed FLOPs, which include recomputation and
the flash backward at 2.5 times the attention forward instead of 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sppo.config.model import ModelConfig
from sppo.cost.parameters import layer_shapes

BACKWARD_RATIO = 2.0
FLASH_BACKWARD_RATIO = 2.5
_Tokens = TypeVar("_Tokens", int, npt.NDArray[np.int64])


def layer_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs per token of all matrix products of one layer."""
    return 2 * sum(prod(shape) for shape in layer_shapes(model).values() if len(shape) == 2)


def pair_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs of attention per visible (query, key) pair of one layer."""
    return 4 * model.num_heads * model.head_dim


def head_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs per token of the vocabulary projection."""
    return 2 * model.vocab_size * model.hidden_size


def causal_pairs(start: _Tokens, end: _Tokens, *, window: int | None = None) -> _Tokens:
    """Return the visible (query, key) pairs of queries ``start..end-1`` that see keys ``0..query``.

    With a sliding ``window``, a query sees only its last ``window`` keys. ``start`` and ``end`` are
    integers or arrays of integers.
    """

    def below(x: _Tokens) -> _Tokens:
        if window is None:
            return x * (x + 1) // 2
        beyond = (x - window) * (x > window)
        near = x - beyond
        return near * (near + 1) // 2 + beyond * window

    return below(end) - below(start)


def forward_flops(model: ModelConfig, *, start: int, end: int) -> int:
    """Return the forward model FLOPs of tokens ``start..end-1``, if the labels of all count."""
    linear = (layer_flops(model) * model.num_layers + head_flops(model)) * (end - start)
    pairs = sum(
        causal_pairs(start, end, window=model.window_of(index)) for index in range(model.num_layers)
    )
    return linear + pair_flops(model) * pairs


def step_flops(model: ModelConfig, *, length: int, sequences: int) -> int:
    """Return the model FLOPs of forward and backward of sequences in which all labels count."""
    return int((1 + BACKWARD_RATIO) * forward_flops(model, start=0, end=length) * sequences)


def sample_flops(model: ModelConfig, lengths: Iterable[int]) -> int:
    """Return the model FLOPs of forward and backward of samples that each attend to themselves."""
    return sum(step_flops(model, length=length, sequences=1) for length in lengths)


def ignored_flops(model: ModelConfig, tokens: int) -> int:
    """Return the FLOPs that a step saves for tokens whose label does not count: the head's."""
    return int((1 + BACKWARD_RATIO) * head_flops(model) * tokens)


def linear_flops(model: ModelConfig, *, label_share: float = 1.0) -> float:
    """Return the forward FLOPs per token of all matrix products of the layers and the head.

    Args:
        model: Model configuration.
        label_share: Share of the tokens whose label counts.
    """
    return layer_flops(model) * model.num_layers + head_flops(model) * label_share


def partition_costs(model: ModelConfig, *, label_share: float = 1.0) -> tuple[float, float]:
    """Return (a, b) of :mod:`sppo.planning.partition`: FLOPs per token and per visible pair.

    Both cover all layers and the head. Attention with a sliding window is nearly linear in the
    number of tokens, so its FLOPs count per token.

    Args:
        model: Model configuration.
        label_share: Share of the tokens whose label counts.
    """
    linear = linear_flops(model, label_share=label_share)
    quadratic = 0.0
    for index in range(model.num_layers):
        window = model.window_of(index)
        if window is None:
            quadratic += pair_flops(model)
        else:
            linear += pair_flops(model) * window
    return linear, quadratic


def recomputed_linear_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the projections that recompute the linear class in backward."""
    gate, k = ("gate",) if model.gated else (), ("k",) if model.qk_norm else ()
    return ("q", "o", "up", *gate, *k)


def recomputed_linear_flops(model: ModelConfig) -> int:
    """Return the FLOPs per token and layer of the products of :func:`recomputed_linear_names`."""
    shapes = layer_shapes(model)
    return 2 * sum(prod(shapes[f"{name}.weight"]) for name in recomputed_linear_names(model))
