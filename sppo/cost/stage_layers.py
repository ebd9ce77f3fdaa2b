"""Layers of each stage of a pipeline: the same for its plan, its training and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sppo.config.model import ModelConfig


def layers_of_stages(model: ModelConfig, *, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each stage.

    Stages have layers as equal in number as possible, longer stages first: the last stages get no
    extra layer, since the last stage also has the vocabulary projection. With linear attention in
    some layers, stages are as equal in weight as possible instead, so that the layers with
    attention, which take longest at long contexts, are spread evenly.

    Raises:
        ValueError: Fewer layers than stages.
    """
    num_layers = model.num_layers
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers on {num_stages} stages: every stage needs a layer; use at most "
            f"{num_layers} stages"
        )
    if model.linear_attention is None:
        size, longer = divmod(num_layers, num_stages)
        ends = [size * stage + min(stage, longer) for stage in range(num_stages + 1)]
    else:
        ends = _ends_of_equal_weights(_weights(model), num_stages=num_stages)
    return tuple(range(begin, end) for begin, end in pairwise(ends))


def _weights(model: ModelConfig) -> list[float]:
    """Return the seconds of each layer relative to those of one with linear attention.

    They are those at the context at which attention takes as long as everything else in all layers:
    stages must not depend on the contexts of a run, which may be many. It is between 64Ki and 256Ki
    tokens in models from 4B to 80B.
    """
    attention = 1 + model.num_layers / model.num_attention_layers
    return [
        1.0 if model.layer_type(layer).linear else attention for layer in range(model.num_layers)
    ]


def _ends_of_equal_weights(weights: Sequence[float], *, num_stages: int) -> list[int]:
    """Return the cuts from 0 to the number of layers that are nearest to equal weights."""
    cuts = np.cumsum([0.0, *weights])
    targets = cuts[-1] * np.arange(num_stages + 1) / num_stages
    nearest = np.searchsorted((cuts[1:] + cuts[:-1]) / 2, targets)
    ends, last = [0], len(weights)
    for stage, end in enumerate(nearest[1:].tolist(), start=1):
        ends.append(min(max(end, ends[-1] + 1), last - (num_stages - stage)))
    return ends
