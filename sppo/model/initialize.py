"""Random initial weights, whatever the layout: each parameter has a generator of its own."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from sppo.config.model import ModelConfig
from sppo.cost.parameters import Shape, parameter_shapes
from sppo.units import GIB

AHEAD_BYTES = GIB
"""Most bytes of parameters, beside a single larger one, that are made before they are taken."""

_RESIDUAL_OUTPUTS = ("o.weight", "down.weight")
_ELEMENT_BYTES = 4


def initial_weights(model: ModelConfig, *, seed: int) -> dict[str, Tensor]:
    """fp32 weights by global name.

    Matrices are normal with ``init_std``; those that write into the residual stream are divided by
    sqrt(2 layers) (GPT-2, section 2.3). Norm weights are one, biases zero.
    """
    return dict(made_ahead(parameter_shapes(model), model=model, seed=seed, threads=1))


def made_ahead(
    shapes: Mapping[str, Shape], *, model: ModelConfig, seed: int, threads: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 weight) of parameters in order, made by several threads at once.

    A generator's numbers come one after another, and so one thread makes a parameter.

    Args:
        shapes: by global name, those to make.
        model: that they are of.
        seed: of all.
        threads: that make them; also the most parameters that are made ahead.
    """
    ahead: deque[tuple[str, int, Future[Tensor]]] = deque()

    def taken() -> tuple[str, Tensor]:
        name, _, future = ahead.popleft()
        return name, future.result()

    with ThreadPoolExecutor(threads) as pool:
        for name, shape in shapes.items():
            size = _ELEMENT_BYTES * math.prod(shape)
            while ahead and (
                len(ahead) == threads or sum(n for _, n, _ in ahead) + size > AHEAD_BYTES
            ):
                yield taken()
            future = pool.submit(initial_weight, name, shape, model=model, seed=seed)
            ahead.append((name, size, future))
        while ahead:
            yield taken()


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
