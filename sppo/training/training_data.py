"""Training data of a run: sequences of its token stream, or samples."""

from __future__ import annotations

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
