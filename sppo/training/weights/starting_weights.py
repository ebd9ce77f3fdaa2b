"""Weights that a run starts from, and those of a checkpoint, with the ones that it leaves out.

A run starts from random weights, from those of ``model.from_hf``, or from those of another run's
checkpoint. Factors of adapters are in that checkpoint if the run goes on with them, in
``adapter.from_peft``, or begin with initial values of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.checkpoint.newest import Checkpoint
from sppo.checkpoint.tensors import read_tensors, saved_shapes
from sppo.config import RunConfig
from sppo.cost.parameters import choice_bias_shapes
from sppo.cost.trainable import trainable_of_run
from sppo.model.huggingface.merged_weights import MergedWeights
from sppo.model.huggingface.peft_weights import open_adapter
from sppo.model.huggingface.reading import open_hf_weights
from sppo.model.initialize import generate_weights_ahead, initial_weight
from sppo.training.weights.base_weights import has_base, run_of, start_of


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
    sources = stored_weights(run, start)
    if run.adapter is not None and run.adapter.from_peft is not None:
        sources.insert(0, open_adapter(Path(run.adapter.from_peft), run.model, run.adapter))
    random = {}
    for name, shape in shapes.items():
        weight = _first(sources, name)
        if weight is None:
            random[name] = shape
        else:
            yield name, weight
    threads = torch.get_num_threads()
    yield from generate_weights_ahead(random, model=run.model, seed=run.train.seed, threads=threads)


def stored_weights(run: RunConfig, start: Checkpoint | None) -> list[Mapping[str, Tensor]]:
    """Return the stored weights of step 0, but for ``adapter.from_peft``; [] if they are random."""
    if start is not None:
        weights = checkpoint_weights(start)
        if run.adapter is None and has_base(start):
            weights = MergedWeights(weights, trainable_of_run(run_of(start)).adapter)
        return [weights]
    if run.hf_weights is not None:
        return [open_hf_weights(Path(run.hf_weights), run.model)]
    return []


def _first(sources: Sequence[Mapping[str, Tensor]], name: str) -> Tensor | None:
    """Return a weight in fp32 from the first source that has it; None if none has."""
    return next((source[name].float() for source in sources if name in source), None)


def checkpoint_weights(
    checkpoint: Checkpoint, saved: Mapping[str, Tensor] | None = None
) -> Mapping[str, Tensor]:
    """Return the fp32 weights of a checkpoint by name, the frozen ones from the run's base.

    Args:
        checkpoint: Verified checkpoint with a checked base (:func:`.base_weights.checked_start`).
        saved: Weights that the checkpoint holds, if they were read; None reads each when it is
            looked up.
    """
    saved = SavedWeights(checkpoint.path) if saved is None else saved
    return _WithBase(checkpoint, saved) if has_base(checkpoint) else saved


class SavedWeights(Mapping[str, Tensor]):
    """Weights that a checkpoint holds, in fp32 by name, each read when it is looked up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        keys = saved_shapes(path)
        self._names = [k.removeprefix(MODEL_PREFIX) for k in keys if k.startswith(MODEL_PREFIX)]

    def __getitem__(self, name: str) -> Tensor:
        key = MODEL_PREFIX + name
        return read_tensors(self._path, names=[key])[key]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _WithBase(Mapping[str, Tensor]):
    """Weights of a checkpoint that leaves out frozen parameters, and of its base."""

    def __init__(self, checkpoint: Checkpoint, saved: Mapping[str, Tensor]) -> None:
        self._run = run_of(checkpoint)
        model = self._run.model
        self._shapes = trainable_of_run(self._run).parameter_shapes(model)
        self._shapes |= choice_bias_shapes(model)
        self._sources = [saved, *stored_weights(self._run, start_of(checkpoint))]

    def __getitem__(self, name: str) -> Tensor:
        weight = _first(self._sources, name)
        if weight is not None:
            return weight
        model, seed = self._run.model, self._run.train.seed
        return initial_weight(name, self._shapes[name], model=model, seed=seed)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def check_weights(run: RunConfig) -> None:
    """Check headers and tied weights of ``model.from_hf`` and ``adapter.from_peft``, if given.

    Raises:
        ValueError: Tensors are missing or unknown, have wrong shapes, or the output projection
            differs from the embedding to which it is tied.
    """
    if run.hf_weights is not None:
        open_hf_weights(Path(run.hf_weights), run.model)
    if run.adapter is not None and run.adapter.from_peft is not None:
        open_adapter(Path(run.adapter.from_peft), run.model, run.adapter)
