"""The token data that a run names, opened and checked against its model. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from sppo.config import RunConfig
from sppo.data.preparation.model_tokenizer import check_same_vocabulary, check_tokenizer
from sppo.data.samples.sample_table import SampleTable, check_samples, sample_table
from sppo.data.tokens import TokenData, check_fits, open_tokens


def open_data(run: RunConfig, directory: str) -> TokenData:
    """Tokens that this run's model and sequence length can use.

    Raises:
        ValueError: missing, damaged, of another tokenizer than the weights, ids beyond the
            vocabulary, or shorter than a sequence.
    """
    data = open_tokens(Path(directory))
    check_tokenizer(data, run.model)
    _check_tokens(run, data)
    return data


def open_evaluated(run: RunConfig) -> TokenData:
    """Tokens that ``sppo eval`` reads: ``data.eval_tokens``, or ``data.tokens`` without them.

    Raises:
        ValueError: see :func:`open_data`; or of another vocabulary than the training tokens.
    """
    data = open_data(run, run.data.eval_tokens or run.data.tokens)
    check_same_vocabulary(data, training=Path(run.data.tokens))
    return data


def samples_of(run: RunConfig, tokens: TokenData) -> SampleTable:
    """Return where the samples of a run of documents lie.

    Raises:
        ValueError: some are longer than the run allows.
    """
    return sample_table(
        tokens.document_offsets, length=run.sequence.length, longer=run.sequence.longer
    )


def _check_tokens(run: RunConfig, tokens: TokenData) -> None:
    """Check that a model can read these tokens, and that there is something to train on.

    Raises:
        ValueError: every rule that is broken, one per line.
    """
    vocab_size = run.model.vocab_size
    if run.data.samples == "documents":
        check_samples(tokens, samples_of(run, tokens), vocab_size=vocab_size)
    else:
        check_fits(tokens, vocab_size=vocab_size, length=run.sequence.length)
