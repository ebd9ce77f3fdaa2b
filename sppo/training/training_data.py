"""Training data of a run, sequences of its token stream or samples, and the check of its labels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sppo.config import RunConfig
from sppo.data.run_tokens import samples_of
from sppo.data.samples.document_samples import DocumentSamples
from sppo.data.sequences import TrainingData
from sppo.data.tokens import open_tokens


def training_data(run: RunConfig) -> TrainingData | DocumentSamples:
    """Open the training data of a run, whose token files were checked before.

    Raises:
        ValueError: The data is missing or damaged, or has samples longer than the run allows.
    """
    tokens = open_tokens(Path(run.data.tokens))
    if run.data.samples == "documents":
        return DocumentSamples(
            samples_of(run, tokens),
            tokens,
            seed=run.train.seed,
            shuffle=run.data.shuffle,
            samples_per_step=run.train.samples_per_step,
            tokens_per_step=run.train.tokens_per_step,
        )
    return TrainingData(
        tokens,
        length=run.sequence.length,
        sequences_per_step=run.train.sequences_per_step,
        seed=run.train.seed,
        shuffle=run.data.shuffle,
        isolate_documents=run.data.isolate_documents,
    )


def check_labels(training: TrainingData | DocumentSamples, *, steps: int) -> None:
    """Raise ValueError if no step has a valid label; stops at the first step that has one."""
    tokens = training.data
    isolates = isinstance(training, TrainingData) and training.isolate_documents
    if tokens.loss_mask is None and not isolates:
        return
    if any(map(training.has_labels, _places_of_steps(training, steps=steps))):
        return
    fix = (
        "Prepare the data again, with a loss mask that is true for what is to be learnt"
        if tokens.loss_mask is not None
        else "Set data.isolate_documents=false, or prepare longer documents"
    )
    raise ValueError(
        f"{training.why_no_labels(0)}, and so it is in every step: there is nothing to learn "
        f"from. {fix}"
    )


def _places_of_steps(training: TrainingData | DocumentSamples, *, steps: int) -> Iterator[int]:
    """Yield the position at which each step of a run begins, for at most one epoch.

    The position is a sample, or the number of a step of sequences. Yields nothing if every document
    of the token stream is a single token, whose sequences have no labels.
    """
    if isinstance(training, DocumentSamples):
        position = 0
        for _ in range(steps):
            if position >= training.num_samples:
                return
            yield position
            position += len(training.step_samples(position))
    elif training.data.num_documents < training.data.num_tokens:
        epoch = -(-training.num_sequences // training.sequences_per_step)
        yield from range(min(steps, epoch))
