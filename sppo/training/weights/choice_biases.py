"""Biases by which experts are chosen: the state that balances loads without a gradient.

They are in fp32, all of them on every rank, and in every checkpoint.

Legend: L layers, X experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.checkpoint.newest import Checkpoint
from sppo.checkpoint.state_block import Blocks, whole
from sppo.config import RunConfig
from sppo.cost.parameters import choice_bias, choice_bias_shapes
from sppo.training.weights.starting_weights import stored_weights

ChoiceBiases = Mapping[str, Tensor]
"""Biases ``[X]`` in fp32 by global name; of no layer if the model chooses by scores alone."""


def starting_choice_biases(
    run: RunConfig, *, start: Checkpoint | None, device: torch.device
) -> ChoiceBiases:
    """Return the biases of step 0: those of the weights that a run starts from, or zeros."""
    shapes = choice_bias_shapes(run.model)
    sources = stored_weights(run, start) if shapes else []
    found = {}
    for name, shape in shapes.items():
        stored = next((source[name] for source in sources if name in source), torch.zeros(shape))
        found[name] = stored.to(device, torch.float32, copy=True)
    return found


def choice_bias_blocks(biases: ChoiceBiases) -> Blocks:
    """Return the biases as the tensors of a checkpoint."""
    return {MODEL_PREFIX + name: [whole(bias_X)] for name, bias_X in biases.items()}


def balance_(biases: ChoiceBiases, loads_LX: Tensor, *, amount: float) -> None:
    """Raise the biases of experts with less than the mean load of their layer, lower the others'.

    Args:
        biases: Biases to change, by ``amount`` or not at all.
        loads_LX: Number of tokens of a step, of all ranks, that chose each expert.
        amount: ``routing.bias_update``.
    """
    means_L1 = loads_LX.double().mean(-1, keepdim=True)
    signs_LX = (means_L1 - loads_LX).sign()
    for layer, signs_X in enumerate(signs_LX):
        if (bias_X := biases.get(choice_bias(layer))) is not None:
            bias_X.add_(signs_X.to(bias_X), alpha=amount)
