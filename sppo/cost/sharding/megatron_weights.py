"""Parameters that a Megatron group shards, and the number of devices that have each part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, layer_shapes

KEYS = ("k", "v")
"""Rows by key/value heads, of which there may be fewer than devices."""
ROWS = ("q", *KEYS, "gate", "up")
COLUMNS = ("o", "down")
"""Their biases, of sums over the group, are one device's."""


def copies_of(name: str, model: ModelConfig, *, degree: int) -> int:
    """Devices of a group that hold the same values of a parameter of a layer.

    Args:
        name: within the layer.
        model: the shape.
        degree: devices over which weights are sharded.
    """
    part = name.split(".")[0]
    if part in KEYS:
        return max(1, degree // model.kv_heads)
    return 1 if part in ROWS or part in COLUMNS else degree


def held_elements(name: str, shape: Shape, model: ModelConfig, *, degree: int) -> float:
    """Elements of a layer's parameter on one device, the one that holds most."""
    if name.split(".")[0] in COLUMNS and name.endswith(".bias"):
        return float(prod(shape))
    return prod(shape) * copies_of(name, model, degree=degree) / degree


@lru_cache(maxsize=256)
def layer_elements(model: ModelConfig, *, degree: int) -> Mapping[int, float]:
    """Elements of one layer on one device, by the devices that hold the same."""
    found: dict[int, float] = {}
    for name, shape in layer_shapes(model).items():
        copies = copies_of(name, model, degree=degree)
        held = held_elements(name, shape, model, degree=degree)
        found[copies] = found.get(copies, 0.0) + held
    return found
