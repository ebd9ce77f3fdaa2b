"""Loss on held-out tokens, in total and by position in the context.

The loss by position shows whether a model uses a long context: if so, it predicts later tokens
better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sppo.data.needle.cells import read_cells
from sppo.data.run_tokens import open_evaluated
from sppo.data.sample_rows import TrainingData
from sppo.data.tokens import TokenData
from sppo.engine.engine import Engine
from sppo.planning.evaluation_plan import EvaluationPlan, plan_evaluation
from sppo.report.validation import perplexity_of
from sppo.training.attention_in_use import load_attention, with_attention_here
from sppo.training.devices.device import machine_of_ranks
from sppo.training.evaluation.forward_engine import WeightSource, forward_engine
from sppo.training.job import Job, token_facts, weight_facts
from sppo.training.validation.evaluate import EvaluatedSet, evaluate_set
from sppo.training.validation.sums import PositionLoss, SetLosses
from sppo.units import counted

_NO_LABEL = (
    "{directory}: no label of its first {counted} counts: the first token of an isolated document "
    "is nobody's label, nor is one that a loss mask leaves out"
)


@dataclass(frozen=True, slots=True)
class FoundNeedles:
    """Needle documents of one length and depth, and how many of their answers are predicted."""

    length: int
    """Tokens of a document."""
    depth: int
    """Share of the text before the needle, in percent."""
    documents: int
    exact: int


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
    accuracy: float = 0.0
    """Fraction of the labels that are the most likely token."""
    exact: float | None = None
    """Fraction of the samples with labels all of whose labels are: greedy decoding gives them. None
    for sequences of a stream."""
    needles: tuple[FoundNeedles, ...] | None = None
    """Needles found by length and depth; None if the data is not that of ``sppo data needle``."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyEvaluation:
    """Engine with weights, and the data that it evaluates, on one rank."""

    engine: Engine
    data: TokenData
    whole: EvaluatedSet
    weights: WeightSource


@contextmanager
def ready_evaluation(
    job: Job, source: Path | None, *, most: int | None = None
) -> Iterator[ReadyEvaluation]:
    """Yield all that an evaluation needs, planned and checked before memory is taken. Collective.

    Args:
        job: Job of the run whose weights are evaluated.
        source: Path of a checkpoint, or of a run whose newest one is evaluated; None evaluates the
            initial weights of the run (``model.from_hf``, or random weights).
        most: Largest number of sequences or samples, from the first on; None for all.

    Raises:
        ValueError: There is no checkpoint, or data or weights cannot be used.
        MemoryError: The evaluation does not fit.
    """
    run, peers, device = job.run, job.peers, job.device
    device.begin()
    data = peers.done_by_all(lambda: open_evaluated(run))
    if job.mesh.is_distributed:
        peers.check_same({**token_facts("data.eval_tokens", data), **weight_facts(run)})
    samples = TrainingData.of(run, data)
    count = samples.num_samples if most is None else min(most, samples.num_samples)
    load_attention(run, device)
    peers.barrier()  # free memory is meaningful once every rank has loaded its libraries
    (least,) = peers.largest([-device.free_bytes(local_ranks=job.local_ranks)])
    lengths = samples.lengths(range(count))
    plan = peers.decided_by_main(lambda: _plan(job, lengths, room_bytes=-int(least)))
    whole = EvaluatedSet.of(run, samples, plan.rows)
    with job.progress.failing(), forward_engine(job, plan.layout, source) as (engine, weights):
        yield ReadyEvaluation(engine, data, whole, weights)


def _plan(job: Job, lengths: Sequence[int], *, room_bytes: int) -> EvaluationPlan:
    run, device, num_ranks = job.run, job.device, job.mesh.shape.num_ranks
    hardware = machine_of_ranks(run, device, num_ranks=num_ranks, local_ranks=job.local_ranks)
    if device.kind == "cuda":
        hardware = with_attention_here(hardware, run, device)
    return plan_evaluation(
        run,
        hardware=hardware,
        lengths=lengths,
        room_bytes=room_bytes,
        host_bytes=device.host_tier_bytes(local_ranks=job.local_ranks),
    )


def evaluate(
    job: Job,
    source: Path | None,
    *,
    most: int | None,
    on_sequence: Callable[[int, int], None],
) -> Evaluation:
    """Return the loss of weights on ``data.eval_tokens``, or else ``data.tokens``. Collective.

    Args:
        job: Job of a run that passed :func:`sppo.training.input_checks.check_evaluation`.
        source: As in :func:`ready_evaluation`.
        most: As in :func:`ready_evaluation`.
        on_sequence: Called with the number of sequences or samples done, and the number of all.

    Raises:
        ValueError: There is no checkpoint, data or weights cannot be used, or no label is valid.
        MemoryError: The evaluation does not fit.
    """
    run = job.run
    with ready_evaluation(job, source, most=most) as ready:
        whole, count = ready.whole, ready.whole.plan.num_samples
        found = evaluate_set(
            job, ready.engine, whole, on_samples=lambda done: on_sequence(done, count)
        )
    are_samples = whole.are_documents
    if not found.num_labels:
        what = counted(count, "sample" if are_samples else "sequence")
        raise ValueError(_NO_LABEL.format(directory=ready.data.directory, counted=what))
    return Evaluation(
        found.loss,
        perplexity_of(found.loss),
        found.num_labels,
        count,
        found.by_position,
        ready.weights.name,
        ready.weights.step,
        str(ready.data.directory),
        run.data.eval_tokens is not None,
        are_samples,
        found.accuracy,
        found.exact if are_samples else None,
        _needles(ready.data, whole, found) if are_samples else None,
    )


def _needles(
    data: TokenData, whole: EvaluatedSet, found: SetLosses
) -> tuple[FoundNeedles, ...] | None:
    """Return the needles found in whole documents; None of other data, or if any is cut."""
    cells = read_cells(data.directory, num_documents=data.num_documents)
    if cells is None or whole.samples.num_samples != data.num_documents:
        return None
    outcomes: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for cell, is_exact in zip(cells.cells, found.exact_samples.tolist(), strict=False):
        outcomes[cell.length, cell.depth].append(is_exact)
    return tuple(
        FoundNeedles(*where, len(own), sum(own)) for where, own in sorted(outcomes.items())
    )
