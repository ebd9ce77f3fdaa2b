"""What a run reads: sequences of its token stream, or samples."""

from __future__ import annotations

from pathlib import Path

from sppo.config import RunConfig
from sppo.data.sample_table import SampleTable, sample_table
from sppo.data.samples import DocumentSamples, check_samples
from sppo.data.sequences import TrainingData
from sppo.data.tokens import TokenData, check_fits, open_tokens


def training_data(run: RunConfig) -> TrainingData | DocumentSamples:
    """Open what a run trains on, whose tokens were checked.

    Raises:
        ValueError: missing, damaged, or samples longer than the run allows.
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


def samples_of(run: RunConfig, tokens: TokenData) -> SampleTable:
    """Return where the samples of a run of documents lie.

    Raises:
        ValueError: some are longer than the run allows.
    """
    return sample_table(
        tokens.document_offsets, length=run.sequence.length, longer=run.sequence.longer
    )


def check_tokens(run: RunConfig, tokens: TokenData) -> None:
    """Check that a model can read these tokens, and that there is something to train on.

    Raises:
        ValueError: every rule that is broken, one per line.
    """
    vocab_size = run.model.vocab_size
    if run.data.samples == "documents":
        check_samples(tokens, samples_of(run, tokens), vocab_size=vocab_size)
    else:
        check_fits(tokens, vocab_size=vocab_size, length=run.sequence.length)
