"""Definition of model FLOPs and executed FLOPs, and of MFU and HFU.

Model FLOPs are causal and without recomputation. Forward: 2 FLOPs per weight and token for every
matrix product (of experts, those of the token), including the vocabulary projection but not the
embedding look-up, plus ``4 * N * D`` per visible (query, key) pair and layer: 2 for q.k, 2 for p.v;
a causal sequence of S tokens has S(S+1)/2 pairs. Linear attention has the FLOPs of its rule instead
(:mod:`sppo.cost.linear_attention.delta_rule`). Backward counts twice the forward: products for the
gradients of inputs, and for those of weights. A frozen weight has no gradient, so it counts 4 FLOPs
per token in all instead of 6; a layer without backward counts its forward alone. Tokens whose label
does not count have no FLOPs of the vocabulary projection, which does not compute them.
``mfu`` = model FLOPs / (time * peak). ``hfu`` uses executed FLOPs, which include recomputation and
the flash backward at 2.5 times the attention forward instead of 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sppo.config.model import ModelConfig
from sppo.cost.layer_kinds import LayerKind, elements, kinds_of_model
from sppo.cost.linear_attention.delta_rule import repeated_rule_flops, rule_flops
from sppo.cost.trainable import EVERYTHING, Trainable, trains_head

BACKWARD_RATIO = 2
FLASH_BACKWARD_RATIO = 2.5
_PASSES = 1 + BACKWARD_RATIO
DOWN = ("down", "expert_down", "shared_down")
"""Projections of the outputs of MLPs."""
_Tokens = TypeVar("_Tokens", int, npt.NDArray[np.int64])


def layer_flops(kind: LayerKind) -> tuple[int, int]:
    """Return the forward and the backward FLOPs per token of the products of a layer.

    They are those with weights, and those of the rule of linear attention.
    """
    forward = 2 * kind.weights_per_token(kind.matrices)
    of_weights = 2 * kind.weights_per_token(kind.trained_matrices)
    of_rule = 0 if kind.linear is None else rule_flops(kind.linear)
    backward = forward + of_weights + BACKWARD_RATIO * of_rule
    return forward + of_rule, backward * kind.has_backward


def head_flops(model: ModelConfig, trainable: Trainable = EVERYTHING) -> tuple[int, int]:
    """Return the forward and the backward FLOPs per token of the vocabulary projection."""
    forward = 2 * model.vocab_size * model.hidden_size
    return forward, forward * (1 + trains_head(model, trainable))


def pair_flops(model: ModelConfig, kind: LayerKind) -> int:
    """Return the forward FLOPs of attention per visible (query, key) pair of one layer.

    They are 0 with linear attention, which has no pairs.
    """
    return 4 * model.num_heads * model.head_dim * (kind.linear is None)


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


def model_flops(
    model: ModelConfig, trainable: Trainable = EVERYTHING, *, start: int, end: int
) -> tuple[int, int]:
    """Return the model FLOPs of forward and of backward of tokens ``start..end-1``.

    The labels of all tokens count.
    """
    tokens = end - start
    forward, backward = (own * tokens for own in head_flops(model, trainable))
    for kind, count in kinds_of_model(model, trainable).items():
        of_forward, of_backward = layer_flops(kind)
        attention = pair_flops(model, kind) * causal_pairs(start, end, window=kind.window)
        forward += count * (of_forward * tokens + attention)
        backward += count * (of_backward * tokens + BACKWARD_RATIO * attention * kind.has_backward)
    return forward, backward


def step_flops(
    model: ModelConfig, trainable: Trainable = EVERYTHING, *, length: int, sequences: int
) -> int:
    """Return the model FLOPs of forward and backward of sequences in which all labels count."""
    return sum(model_flops(model, trainable, start=0, end=length)) * sequences


def sample_flops(model: ModelConfig, lengths: Iterable[int], trainable: Trainable) -> int:
    """Return the model FLOPs of forward and backward of samples that each attend to themselves."""
    return sum(step_flops(model, trainable, length=length, sequences=1) for length in lengths)


def ignored_flops(model: ModelConfig, tokens: int, trainable: Trainable) -> int:
    """Return the FLOPs that a step saves for tokens whose label does not count: the head's."""
    return sum(head_flops(model, trainable)) * tokens


def linear_flops(model: ModelConfig, trainable: Trainable) -> int:
    """Return the FLOPs per token, forward and backward, of all products of layers and head."""
    kinds = kinds_of_model(model, trainable).items()
    layers = sum(sum(layer_flops(kind)) * count for kind, count in kinds)
    return layers + sum(head_flops(model, trainable))


def partition_costs(
    model: ModelConfig, trainable: Trainable = EVERYTHING, *, label_share: float = 1.0
) -> tuple[float, float]:
    """Return (a, b) of :mod:`sppo.planning.partition`: FLOPs per token and per visible pair.

    Both cover all layers and the head, and are means over a forward and the two products of a
    backward: with frozen weights, a token costs less beside a pair. Attention with a sliding window
    is nearly linear in the number of tokens, so its FLOPs count per token.

    Args:
        model: Model configuration.
        trainable: Parameters that train.
        label_share: Share of the tokens whose label counts.
    """
    linear = sum(head_flops(model, trainable)) / _PASSES * label_share
    quadratic = 0.0
    for kind, count in kinds_of_model(model, trainable).items():
        passes = 1 + BACKWARD_RATIO * kind.has_backward
        of_pair = pair_flops(model, kind) * passes * count / _PASSES
        linear += sum(layer_flops(kind)) * count / _PASSES
        if kind.window is None:
            quadratic += of_pair
        else:
            linear += of_pair * kind.window
    return linear, quadratic


def recomputed_linear_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the projections that recompute the linear class in backward.

    With post norms, the class has the output of the MLP.
    """
    inputs = ("gate", "up", "expert_gate", "expert_up", "shared_gate", "shared_up")
    outputs = DOWN if model.norms_outputs else ()
    k = ("k",) if model.qk_norm else ()
    linear = (f"linear_{name}" for name in ("q", "k", "v", "gate", "decay", "beta", "o"))
    return ("q", "o", *inputs, *outputs, *k, "attention_gate", *linear)


def recomputed_linear_flops(model: ModelConfig, kind: LayerKind) -> int:
    """Return the FLOPs per token and layer of the products of :func:`recomputed_linear_names`."""
    return 2 * kind.weights_per_token(kind.projections(*recomputed_linear_names(model)))


def repeated_flops(kind: LayerKind) -> int:
    """Return the FLOPs per token and layer that backward repeats, whatever is saved."""
    again = 2 * elements(kind.repeated)
    return again if kind.linear is None else again + repeated_rule_flops(kind.linear)


def recomputed_output_flops(model: ModelConfig, kind: LayerKind) -> int:
    """Return the FLOPs per token of a layer's output from its input and recomputed linear class.

    With post norms, the class has the output before its norm.
    """
    if model.norms_outputs:
        return 0
    return 2 * kind.weights_per_token(kind.projections(*DOWN))
