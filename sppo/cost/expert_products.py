"""Seconds and kernels of the products of all experts of a layer on one device.

Each expert is priced with the same number of rows in every tile of tokens, T k / X. One kernel of a
GPU multiplies the rows of all experts (:mod:`sppo.kernels.grouped`), so these fill the GPU
together, but the last tile of each expert is half empty on average. Where experts are multiplied
one after another, each is a product of its own. In both cases memory transfers the weights of all
experts once for each tile.

Legend: T tokens of a tile, X experts, k experts of a token.
"""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

from sppo.config.model import Experts, ModelConfig
from sppo.cost.layer_kinds import LayerKind, is_stacked
from sppo.cost.parameters import Shape
from sppo.cost.tiles import expert_tile_tokens
from sppo.hardware.description import DeviceSpec
from sppo.hardware.rates import BLOCK_TOKENS, Floats, Product

_ROUTING_KERNELS = 28, 40
"""Kernels of a forward and of a backward that choose experts, sort rows and move them."""


def multiplies_at_once(device: DeviceSpec, dtype: str) -> bool:
    """Return whether one kernel multiplies the rows of all experts."""
    return device.kind == "cuda" and dtype == "bf16"


def num_tiles(model: ModelConfig, device: DeviceSpec, *, tokens: Floats) -> Floats:
    """Return the tiles in which tokens pass through the experts of a layer, [subsequences]."""
    if model.experts is None:
        return np.ones_like(tokens)
    whole = np.ceil(tokens / expert_tile_tokens(model.experts, device=device.kind))
    tiles: Floats = np.maximum(1.0, whole)
    return tiles


def expert_seconds(
    device: DeviceSpec,
    experts: Experts,
    stacked: Shape,
    *,
    dtype: str,
    element_bytes: int,
    tokens: Floats,
    product: Product,
) -> Floats:
    """Return the seconds of a product of all experts of a layer, [subsequences].

    Args:
        device: Device of the products.
        experts: Experts of the layer.
        stacked: Shape of their weights, [X, outputs, inputs].
        dtype: Compute dtype.
        element_bytes: Bytes of its elements.
        tokens: Tokens of each subsequence on the device.
        product: Product to price.
    """
    tiles = np.maximum(1, tokens / expert_tile_tokens(experts, device=device.kind))
    rows, width = tokens / tiles * experts.per_token / experts.count, sqrt(prod(stacked[1:]))
    if multiplies_at_once(device, dtype):
        together = rows * experts.count
        rate = device.gemm_flops_per_s(dtype, tokens=together, width=width, product=product)
        rate = rate * rows / (rows + BLOCK_TOKENS / 2)
    else:
        rate = device.gemm_flops_per_s(dtype, tokens=rows, width=width, product=product)
    seconds: Floats = 2 * prod(stacked) * rows / rate
    read = 0 if product == "weight" else prod(stacked) * element_bytes
    return np.maximum(seconds, read / device.memory_bytes_per_s) * tiles


def expert_kernels(device: DeviceSpec, kind: LayerKind, *, dtype: str) -> tuple[int, int]:
    """Return the kernels of a forward and of a backward that a layer has beside those of an MLP."""
    if not kind.type.routed:
        return 0, 0
    forward, backward = _ROUTING_KERNELS
    if multiplies_at_once(device, dtype):
        return forward, backward
    further, trained = (
        sum(shape[0] - 1 for _, shape in shapes if is_stacked(shape))
        for shapes in (kind.matrices, kind.trained_matrices)
    )
    return forward + further, backward + further + trained
