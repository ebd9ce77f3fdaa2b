"""Random initial weights, whatever the layout: each parameter has a generator of its own."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, parameter_shapes

_RESIDUAL_OUTPUTS = ("o.weight", "down.weight")


def initial_weights(model: ModelConfig, *, seed: int) -> dict[str, Tensor]:
    """fp32 weights by global name.

    Matrices are normal with ``init_std``; those that write into the residual stream are divided by
    sqrt(2 layers) (GPT-2, section 2.3). Norm weights are one, biases zero.
    """
    return {
        name: initial_weight(name, shape, model=model, seed=seed)
        for name, shape in parameter_shapes(model).items()
    }


def initial_weight(name: str, shape: Shape, *, model: ModelConfig, seed: int) -> Tensor:
    """One parameter in fp32, a function of (seed, name, shape) alone."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    residual = name.endswith(_RESIDUAL_OUTPUTS)
    std = model.init_std / math.sqrt(2 * model.num_layers) if residual else model.init_std
    return torch.empty(shape).normal_(0.0, std, generator=generator)
