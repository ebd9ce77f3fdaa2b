"""Loss on held-out tokens, in total and by position in the context.

The loss by position shows whether a model uses a long context: if so, it predicts later tokens
better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from sppo.checkpoint.checkpoint import read_weights
from sppo.config import RunConfig
from sppo.cost.layer import Workload
from sppo.cost.memory.state_memory import evaluation_bytes
from sppo.data.run_tokens import open_evaluated
from sppo.data.sample_rows import TrainingData
from sppo.engine.engine import Engine
from sppo.hardware.description import HardwareSpec
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.partition import lengths_of
from sppo.planning.run_plan import evaluation_boundaries
from sppo.quoting import quoted
from sppo.report.validation import perplexity_of
from sppo.training.devices.device import Device
from sppo.training.job import Job
from sppo.training.starting_checkpoint import starting_checkpoint
from sppo.training.starting_weights import check_weights, starting_weights
from sppo.training.state import DTYPES
from sppo.training.validation.evaluate import EvaluatedSet, evaluate_set
from sppo.training.validation.sums import PositionLoss
from sppo.units import format_bytes

_NO_LABEL = (
    "{directory}: no label of its first {counted} counts: the first token of an isolated document "
    "is nobody's label, nor is one that a loss mask leaves out"
)
_NOT_ITS_SHAPE = frozenset({"preset", "from_hf", "family", "init_std"})
"""Keys of the model section that do not change the function that the model computes."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of one evaluation."""

    loss: float
    """Mean loss over all valid labels, in nats."""
    perplexity: float
    num_tokens: int
    num_sequences: int
    """Number of sequences, or of samples if the run trains on samples."""
    by_position: tuple[PositionLoss, ...]
    weights_from: str
    """Checkpoint, directory or seed that the weights come from."""
    step: int
    """Optimizer steps with which the weights were trained."""
    tokens_from: str
    """Directory of the token data."""
    held_out: bool
    """True if the tokens are ``data.eval_tokens`` rather than training tokens."""
    are_samples: bool = False
    """True if `num_sequences` counts samples."""


def evaluate(
    run: RunConfig,
    source: Path | None,
    *,
    device: Device,
    most: int | None,
    on_sequence: Callable[[int, int], None],
) -> Evaluation:
    """Return the loss of weights on ``data.eval_tokens``, or else ``data.tokens``.

    Args:
        run: Run configuration that passed
            :func:`sppo.training.input_checks.check_evaluation`.
        source: Path of a checkpoint, or of a run whose newest one is evaluated; None evaluates the
            initial weights of the run (``model.from_hf``, or random weights).
        device: Device that computes.
        most: Largest number of sequences or samples, from the first on; None for all.
        on_sequence: Called after each sequence with the number of sequences or samples done, and
            the number of all.

    Raises:
        ValueError: There is no checkpoint, data or weights cannot be used, or no label is valid.
        MemoryError: The evaluation does not fit in this machine's memory.
    """
    data = open_evaluated(run)
    machine = None if device.kind == "cpu" else device.machine()
    hardware = hardware_for(run.hardware, this_machine=machine)
    boundaries = evaluation_boundaries(run, hardware=hardware)
    device.begin()
    _check_memory(run, hardware=hardware, boundaries=boundaries, device=device)
    weights, weights_from, step = _weights(run, source, device=device.torch_device)
    engine = Engine(run.model, weights=weights, gradients=None)
    are_samples = run.data.samples == "documents"
    whole = EvaluatedSet.of(
        TrainingData.of(run, data), boundaries=boundaries, packs=are_samples, most=most
    )
    count = whole.num_samples
    found = evaluate_set(
        Job.alone(run, device=device, console=Console(quiet=True)),
        engine,
        whole,
        on_samples=lambda done: on_sequence(done, count),
    )
    if not found.num_labels:
        counted = f"{count} {'samples' if are_samples else 'sequences'}"
        raise ValueError(_NO_LABEL.format(directory=data.directory, counted=counted))
    return Evaluation(
        found.loss,
        perplexity_of(found.loss),
        found.num_labels,
        count,
        found.by_position,
        weights_from,
        step,
        str(data.directory),
        run.data.eval_tokens is not None,
        are_samples,
    )


def _check_memory(
    run: RunConfig, *, hardware: HardwareSpec, boundaries: tuple[int, ...], device: Device
) -> None:
    workload = Workload(run.model, hardware, dtype=run.train.dtype)
    needed = evaluation_bytes(workload, lengths=lengths_of(boundaries))
    if needed > device.free_bytes(local_ranks=1):
        raise MemoryError(
            f"evaluating a sequence of {run.sequence.length} tokens needs {format_bytes(needed)}: "
            f"{device.describe_free_memory()}; shorten sequence.length, or evaluate on a larger "
            "machine"
        )


def _weights(
    run: RunConfig, source: Path | None, *, device: torch.device
) -> tuple[dict[str, Tensor], str, int]:
    """Return (weights on the device in the compute dtype, their source, steps of training)."""
    dtype = DTYPES[run.train.dtype]
    if source is None:
        check_weights(run)
        initial = starting_weights(run, start=starting_checkpoint(run))
        weights = {name: w.to(device, dtype) for name, w in initial}
        return weights, run.initial_weights, 0
    found, weights = read_weights(source)  # the newest checkpoint at this moment
    _check_model(run, found.metadata, found.path)
    placed = {name: w.to(device, dtype) for name, w in weights.items()}
    return placed, str(found.path), found.step


def _check_model(run: RunConfig, metadata: dict[str, object], path: Path) -> None:
    config = metadata.get("config")
    trained = config.get("model") if isinstance(config, dict) else None
    ours = run.model.model_dump(mode="json")
    if not isinstance(trained, dict):
        return
    different = [
        f"model.{key} is {quoted(trained[key])} there, {quoted(ours[key])} in the run file"
        for key in ours.keys() & trained.keys() - _NOT_ITS_SHAPE
        if ours[key] != trained[key]
    ]
    if different:
        raise ValueError(
            f"{path} holds another model: {'; '.join(sorted(different))}. "
            "Use the run file it was trained with"
        )
