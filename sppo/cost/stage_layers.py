"""Layers of each stage of a pipeline: the same for its plan, its training and its checkpoints."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from sppo.config.model import ModelConfig


def layers_of_stages(
    model: ModelConfig, *, num_ranks: int, num_virtual: int = 1
) -> tuple[range, ...]:
    """Return the layers of each stage; stage s is on rank s mod `num_ranks`.

    Stages have layers as equal in number as possible, longer stages first: the last stages get no
    extra layer, since the last stage also has the vocabulary projection. With linear attention in
    some layers, stages and ranks are as equal in weight as possible instead, so that the layers
    with attention, which take longest at long contexts, are spread evenly.

    Raises:
        ValueError: Fewer layers than stages.
    """
    num_layers, num_stages = model.num_layers, num_ranks * num_virtual
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers on {num_stages} stages: every stage needs a layer; use at most "
            f"{num_layers} stages"
        )
    if model.linear_attention is None:
        size, longer = divmod(num_layers, num_stages)
        ends = [size * stage + min(stage, longer) for stage in range(num_stages + 1)]
    else:
        ends = _ends_of_equal_weights(model, num_ranks=num_ranks, num_virtual=num_virtual)
    return tuple(range(begin, end) for begin, end in pairwise(ends))


def _ends_of_equal_weights(model: ModelConfig, *, num_ranks: int, num_virtual: int) -> list[int]:
    """Return the cuts from 0 to the number of layers that are nearest to equal weights.

    A layer with attention has the weight of its seconds relative to those of the others at the
    context at which attention takes as long as everything else in all layers, 64Ki to 256Ki tokens
    in models from 4B to 80B: stages must not depend on the contexts of a run, which may be many.

    Where stages cannot have equally many layers with attention, the first stages of all ranks are
    rounded up and the last ones down, so that not always the same ranks have one more.
    """
    num_stages, num_layers = num_ranks * num_virtual, model.num_layers
    ratio = num_layers / model.num_attention_layers
    types = map(model.layer_type, range(num_layers))
    weights = np.cumsum([0.0, *(1.0 if own.linear else 1 + ratio for own in types)])
    stages = np.arange(1, num_stages)
    targets = weights[-1] * stages / num_stages
    if model.num_attention_layers % num_stages:
        turns = (stages - 1) // num_ranks
        targets += weights[-1] / model.num_attention_layers * (0.5 - (turns + 0.5) / num_virtual)
    ends = [0]
    nearest = np.searchsorted((weights[1:] + weights[:-1]) / 2, targets)
    for stage, end in zip(stages.tolist(), nearest.tolist(), strict=True):
        ends.append(min(max(end, ends[-1] + 1), num_layers - (num_stages - stage)))
    return [*ends, num_layers]
