"""Engine of one rank for forwards alone, with the weights of a checkpoint, or of step 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from sppo.checkpoint.checkpoint import MODEL_PREFIX
from sppo.checkpoint.newest import Checkpoint, find_checkpoint
from sppo.checkpoint.tensors import check_fits, load_tensors
from sppo.config import RunConfig
from sppo.config.model import NOT_COMPUTED
from sppo.cost.parameters import choice_bias_shapes
from sppo.cost.trainable import Adapter, trainable_of_run, trainable_of_sections
from sppo.engine.engine import Engine
from sppo.engine.providers.part_rows import Rows
from sppo.optim.sharded_state import ShardedState
from sppo.planning.plan import ExecutionPlan
from sppo.quoting import quoted
from sppo.training.connections import connect_pipeline
from sppo.training.job import Job
from sppo.training.starting_checkpoint import starting_checkpoint
from sppo.training.state import DTYPES, state_tier, used_weights, zero_rows
from sppo.training.weights.base_weights import checked_start, has_base
from sppo.training.weights.choice_biases import (
    ChoiceBiases,
    choice_bias_blocks,
    starting_choice_biases,
)
from sppo.training.weights.starting_weights import (
    SavedWeights,
    check_weights,
    checkpoint_weights,
    starting_weights,
)


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Weights that are evaluated."""

    name: str
    """Checkpoint, directory or seed that they come from."""
    step: int
    """Optimizer steps with which they were trained."""


@contextmanager
def forward_engine(
    job: Job, plan: ExecutionPlan, source: Path | None
) -> Iterator[tuple[Engine, WeightSource]]:
    """Yield an engine without gradients, and where its weights come from. Collective.

    Args:
        job: Job of the run whose weights are evaluated.
        plan: Plan with the stages and the tiers of the weights.
        source: Path of a checkpoint, or of a run whose newest one is read; None for the initial
            weights of the run.

    Raises:
        ValueError: There is no checkpoint, it is of another model, or weights cannot be read.
        MemoryError: Memory does not suffice.
    """
    run, device, tiers = job.run, job.device, plan.state
    pipeline, place = connect_pipeline(job, plan), device.torch_device
    sharded = ShardedState(
        run.model,
        mesh=job.mesh,
        pipeline=pipeline,
        device=place,
        zero=run.parallel.zero,
        trainable=plan.trainable,
    )
    with ExitStack() as stack:
        memory, lane = state_tier(job, tiers) if tiers.streams_weights else (None, None)
        if lane is not None:
            stack.enter_context(closing(lane))
        dtype, away = DTYPES[run.train.dtype], sharded.streamed_keys(tiers)
        rows = zero_rows(sharded.weight_shapes, dtype, away, memory=memory, place=place)
        if source is None:
            found, biases = _fill_initial(job, sharded, rows)
        else:
            found, biases = _fill_from_checkpoint(job, sharded, rows, source)
        if memory is not None:
            memory.drop_pages()
        streamed = {"stages": sharded.keys_of_stages, "device": place, "lane": lane}
        used = used_weights(rows, sharded, tiers, **streamed)
        device.trim()  # frees memory that only the reading used
        engine = Engine(
            run.model,
            weights=sharded.provider(used),
            gradients=None,
            pipeline=pipeline,
            trainable=plan.trainable,
            choice_biases=biases,
            stopwatch=device.stopwatch(),
            debug=run.activations.debug,
        )
        yield stack.enter_context(closing(engine)), found


def _fill_initial(job: Job, sharded: ShardedState, rows: Rows) -> tuple[WeightSource, ChoiceBiases]:
    """Fill rows with the weights of step 0, and return the biases by which experts are chosen."""
    run = job.run
    job.peers.decided_by_main(lambda: check_weights(run))
    start = job.peers.decided_by_main(lambda: _start(run))

    def fill() -> None:
        for name, weight in starting_weights(run, sharded.shapes, start=start):
            sharded.fill(rows, name, sharded.sharding.cut(name, weight))

    job.peers.done_by_all(fill)
    biases = starting_choice_biases(run, start=start, device=job.device.torch_device)
    return WeightSource(run.initial_weights, 0), biases


def _start(run: RunConfig) -> Checkpoint | None:
    """Return the checkpoint of another run that a run starts from, verified with its base."""
    start = starting_checkpoint(run)
    if start is not None:
        checked_start(start)
    return start


def _fill_from_checkpoint(
    job: Job, sharded: ShardedState, rows: Rows, source: Path
) -> tuple[WeightSource, ChoiceBiases]:
    """Fill rows from a checkpoint, and return the biases by which experts are chosen.

    If its run deletes the checkpoint meanwhile, a newer one is read.
    """
    device = job.device.torch_device
    biases = {
        name: torch.zeros(shape, device=device)
        for name, shape in choice_bias_shapes(job.run.model).items()
    }
    peers, every = job.peers, {**sharded.weight_blocks(rows), **choice_bias_blocks(biases)}

    def load(found: Checkpoint) -> None:
        blocks, frozen = every, set[str]()
        if has_base(found):
            frozen = sharded.shapes.keys() - set(SavedWeights(found.path))
            blocks = {key: own for key, own in every.items() if _name(key) not in frozen}
        check_fits(found.path, blocks)
        load_tensors(found.path, into=blocks)
        weights = checkpoint_weights(found)
        for name in frozen:
            sharded.fill(rows, name, sharded.sharding.cut(name, weights[name]))

    while True:
        found = peers.decided_by_main(lambda: _checkpoint(job.run, source))
        try:
            peers.done_by_all(partial(load, found))
        except Exception:
            if peers.decided_by_main(found.path.is_dir):
                raise
            continue
        return WeightSource(str(found.path), found.step), biases


def _name(key: str) -> str:
    """Return the parameter that a key of a checkpoint's weights names."""
    return key.removeprefix(MODEL_PREFIX)


def _checkpoint(run: RunConfig, source: Path) -> Checkpoint:
    """Return the checkpoint at `source`, which is of the run's model and has its base."""
    found = find_checkpoint(source)
    checked_start(found)
    config = found.metadata.get("config")
    if not isinstance(config, dict) or not isinstance(trained := config.get("model"), dict):
        return found
    ours = run.model.model_dump(mode="json")
    different = [
        f"model.{key} is {quoted(trained[key])} there, {quoted(ours[key])} in the run file"
        for key in ours.keys() & trained.keys() - NOT_COMPUTED
        if ours[key] != trained[key]
    ]
    if different:
        raise ValueError(
            f"{found.path} holds another model: {'; '.join(sorted(different))}. "
            "Use the run file it was trained with"
        )
    there, here = trainable_of_sections(config | {"model": ours}), trainable_of_run(run)
    if not here.has_factors_of(there, run.model):
        raise ValueError(
            f"{found.path} was trained with {_named(there.adapter)}, and the run file has "
            f"{_named(here.adapter)}. Use the run file it was trained with"
        )
    return found


def _named(adapter: Adapter | None) -> str:
    """Return words for an adapter in messages."""
    if adapter is None:
        return "no adapter"
    layers = "all layers" if adapter.layers is None else f"layers {list(adapter.layers)}"
    targets = ", ".join(adapter.targets)
    return f"an adapter of rank {adapter.rank} and scale {adapter.scale:g}, {targets} of {layers}"
