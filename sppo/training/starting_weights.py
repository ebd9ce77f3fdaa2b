"""Weights that a run starts from: random ones, or those of ``model.from_hf``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from sppo.config import RunConfig
from sppo.cost.parameters import parameter_shapes
from sppo.model.hf_reading import open_hf_weights
from sppo.model.initialize import generate_weights_ahead


def starting_weights(
    run: RunConfig, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 weight) of step 0: from ``model.from_hf``, or random from the seed.

    Args:
        run: Validated run configuration.
        names: Names of the weights to yield; None for all.
    """
    every = parameter_shapes(run.model)
    shapes = every if names is None else {name: every[name] for name in names}
    if run.model.from_hf is None:
        threads = torch.get_num_threads()
        yield from generate_weights_ahead(
            shapes, model=run.model, seed=run.train.seed, threads=threads
        )
        return
    stored = open_hf_weights(Path(run.model.from_hf), run.model)
    for name in shapes:
        yield name, stored[name].float()


def check_weights(run: RunConfig) -> None:
    """Check headers and tied weights of ``model.from_hf``, if given.

    Raises:
        ValueError: Tensors are missing or unknown, have wrong shapes, or the output projection
            differs from the embedding to which it is tied.
    """
    if run.model.from_hf is not None:
        open_hf_weights(Path(run.model.from_hf), run.model)
