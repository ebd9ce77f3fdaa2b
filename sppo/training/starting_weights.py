"""Weights that a run starts from: random, of ``model.from_hf``, or of another run's checkpoint.

Factors of adapters are in none of these, and begin with initial values of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.checkpoint.newest import Checkpoint
from sppo.checkpoint.tensors import read_tensors
from sppo.config import RunConfig
from sppo.cost.trainable import is_factor, trainable_of_run
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
    every = trainable_of_run(run).parameter_shapes(run.model)
    shapes = every if names is None else {name: every[name] for name in names}
    read = _reader(run, start)
    if read is not None:
        yield from ((name, read(name)) for name in shapes if not is_factor(name))
        shapes = {name: shape for name, shape in shapes.items() if is_factor(name)}
    threads = torch.get_num_threads()
    yield from generate_weights_ahead(shapes, model=run.model, seed=run.train.seed, threads=threads)


def _reader(run: RunConfig, start: Checkpoint | None) -> Callable[[str], Tensor] | None:
    """Return a function that reads a weight in fp32; None if all weights are random."""
    if start is not None:
        return lambda name: next(
            iter(read_tensors(start.path, names=[f"{MODEL_PREFIX}{name}"]).values())
        )
    if run.hf_weights is None:
        return None
    stored = open_hf_weights(Path(run.hf_weights), run.model)
    return lambda name: stored[name].float()


def check_weights(run: RunConfig) -> None:
    """Check headers and tied weights of ``model.from_hf``, if given.

    Raises:
        ValueError: Tensors are missing or unknown, have wrong shapes, or the output projection
            differs from the embedding to which it is tied.
    """
    if run.hf_weights is not None:
        open_hf_weights(Path(run.hf_weights), run.model)
