"""Loss on held-out tokens, in total and by position in the context.

The loss by position shows whether a model uses a long context: if so, it predicts later tokens
better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sppo.checkpoint.checkpoint import read_weights
from sppo.config import RunConfig
from sppo.cost.layer import Workload
from sppo.cost.memory.state_memory import evaluation_bytes
from sppo.data.run_tokens import open_evaluated
from sppo.data.sample_rows import TrainingData
from sppo.engine.engine import Engine
from sppo.engine.unit import document_positions
from sppo.hardware.description import HardwareSpec
from sppo.hardware.run_hardware import hardware_for
from sppo.kernels.labels import IGNORED_LABEL
from sppo.planning.partition import lengths_of
from sppo.planning.run_plan import evaluation_boundaries
from sppo.quoting import quoted
from sppo.training.devices.device import Device
from sppo.training.starting_weights import check_weights, starting_weights
from sppo.training.state import DTYPES
from sppo.units import format_bytes

_FIRST_BIN_TOKENS = 64
_NO_LABEL = (
    "{directory}: no label of its first {counted} counts: the first token of an isolated document "
    "is nobody's label, nor is one that a loss mask leaves out"
)
_LARGEST_EXPONENT = 700
_NOT_ITS_SHAPE = frozenset({"preset", "from_hf", "family", "init_std"})
"""Keys of the model section that do not change the function that the model computes."""


@dataclass(frozen=True, slots=True)
class PositionLoss:
    """Mean loss of the tokens at positions ``[start, end)`` of their sequence."""

    start: int
    end: int
    loss: float
    num_tokens: int


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
    samples, are_samples = TrainingData.of(run, data), run.data.samples == "documents"
    count = samples.num_samples if most is None else min(most, samples.num_samples)
    losses_S = torch.zeros(run.sequence.length, dtype=torch.float64)
    counts_S = torch.zeros(run.sequence.length, dtype=torch.int64)
    done = 0
    for own, cuts in _sequences(samples, count, boundaries=boundaries, packs=are_samples):
        sequence = samples.row(own)
        losses = engine.evaluate(device.put(sequence), cuts).double().cpu()
        positions = document_positions(len(losses), sequence.document_starts)
        losses_S.index_add_(0, positions, losses)
        counts_S.index_add_(0, positions, (sequence.labels_S != IGNORED_LABEL).long())
        done += len(own)
        on_sequence(done, count)
    if not counts_S.any():
        counted = f"{count} {'samples' if are_samples else 'sequences'}"
        raise ValueError(_NO_LABEL.format(directory=data.directory, counted=counted))
    loss = float(losses_S.sum() / counts_S.sum())
    return Evaluation(
        loss,
        math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf,
        int(counts_S.sum()),
        count,
        loss_by_position(losses_S, counts_S),
        weights_from,
        step,
        run.data.eval_tokens or run.data.tokens,
        run.data.eval_tokens is not None,
        are_samples,
    )


def _sequences(
    samples: TrainingData, count: int, *, boundaries: tuple[int, ...], packs: bool
) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Yield the samples of each sequence to evaluate, and its subsequence boundaries.

    Args:
        samples: Samples, or sequences of the stream, of which the first `count` are evaluated.
        count: Number of samples to evaluate.
        boundaries: Subsequence boundaries of a sequence of the run's full length.
        packs: Pack samples, in their order, into sequences that are not longer than a subsequence;
            a longer sample is a sequence of its own. False for sequences of the stream.
    """
    if not packs:
        yield from (([index], boundaries) for index in range(count))
        return
    own: list[int] = []
    most, tokens = max(lengths_of(boundaries)), 0
    for index, length in enumerate(samples.lengths(range(count))):
        if own and tokens + length > most:
            yield own, (*range(0, tokens, most), tokens)
            own, tokens = [], 0
        own.append(index)
        tokens += length
    if own:
        yield own, (*range(0, tokens, most), tokens)


def loss_by_position(losses_S: Tensor, counts_S: Tensor) -> tuple[PositionLoss, ...]:
    """Return the mean loss in bins that double in width: [0, 64), [64, 128), [128, 256), ...

    Args:
        losses_S: Sum of the losses at each position.
        counts_S: Number of valid labels at each position; bins without valid labels are omitted.
    """
    bins = []
    start, end, length = 0, min(_FIRST_BIN_TOKENS, len(losses_S)), len(losses_S)
    while start < length:
        count = int(counts_S[start:end].sum())
        if count:
            bins.append(PositionLoss(start, end, float(losses_S[start:end].sum()) / count, count))
        start, end = end, min(end * 2, length)
    return tuple(bins)


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
        weights = {name: w.to(device, dtype) for name, w in starting_weights(run)}
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
