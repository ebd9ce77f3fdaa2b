"""Parameters that a Megatron group shards, and the number of devices that hold each shard."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, layer_shapes

KEYS = ("k", "v")
"""Linear layers sharded by key/value heads, of which there may be fewer than devices."""
ROWS = ("q", *KEYS, "gate", "up")
COLUMNS = ("o", "down")
"""Linear layers sharded by columns; one device holds the bias, which is added to the group's sum.

`ROWS` are sharded by rows, including their biases."""


def copies_of(name: str, model: ModelConfig, *, degree: int) -> int:
    """Return the number of devices of a group that hold the same values of a layer's parameter.

    Args:
        name: Name of the parameter within the layer.
        model: Shape of the model.
        degree: Devices over which weights are sharded.
    """
    part = name.split(".")[0]
    if part in KEYS:
        return max(1, degree // model.kv_heads)
    return 1 if part in ROWS or part in COLUMNS else degree


def held_elements(name: str, shape: Shape, model: ModelConfig, *, degree: int) -> float:
    """Return the elements of a layer's parameter on the device that holds the most."""
    if name.split(".")[0] in COLUMNS and name.endswith(".bias"):
        return float(prod(shape))
    return prod(shape) * copies_of(name, model, degree=degree) / degree


@lru_cache(maxsize=256)
def layer_elements(model: ModelConfig, *, degree: int) -> Mapping[int, float]:
    """Return the elements of a layer on one device, by the number of devices that hold the same."""
    found: dict[int, float] = {}
    for name, shape in layer_shapes(model).items():
        copies = copies_of(name, model, degree=degree)
        held = held_elements(name, shape, model, degree=degree)
        found[copies] = found.get(copies, 0.0) + held
    return found
