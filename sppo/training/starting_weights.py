"""Weights that a run starts from: random, of ``model.from_hf``, or of another run's checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.checkpoint.newest import Checkpoint
from sppo.checkpoint.tensors import read_tensors
from sppo.config import RunConfig
from sppo.cost.parameters import parameter_shapes
from sppo.model.hf_reading import open_hf_weights
from sppo.model.initialize import generate_weights_ahead


def starting_weights(
    run: RunConfig, names: Iterable[str] | None = None, *, start: Checkpoint | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 weight) of step 0.

    Args:
        run: Validated run configuration.
        names: Names of the weights to yield; None for all.
        start: Verified checkpoint from which ``run.start`` starts. None for the weights of
            ``model.from_hf``, or random weights from the seed; these also for a run that goes on
            from a checkpoint of its own, which replaces them.
    """
    every = parameter_shapes(run.model)
    shapes = every if names is None else {name: every[name] for name in names}
    if start is not None:
        for name in shapes:
            key = f"{MODEL_PREFIX}{name}"
            yield name, read_tensors(start.path, names=[key])[key]
        return
    if run.hf_weights is None:
        threads = torch.get_num_threads()
        yield from generate_weights_ahead(
            shapes, model=run.model, seed=run.train.seed, threads=threads
        )
        return
    stored = open_hf_weights(Path(run.hf_weights), run.model)
    for name in shapes:
        yield name, stored[name].float()


def check_weights(run: RunConfig) -> None:
    """Check headers and tied weights of ``model.from_hf``, if given.

    Raises:
        ValueError: Tensors are missing or unknown, have wrong shapes, or the output projection
            differs from the embedding to which it is tied.
    """
    if run.hf_weights is not None:
        open_hf_weights(Path(run.hf_weights), run.model)
