"""Opening of the token data that a run names, checked against its model. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from sppo.config import RunConfig
from sppo.data.preparation.model_tokenizer import check_same_vocabulary, check_tokenizer
from sppo.data.samples.sample_table import SampleTable, check_samples, sample_table
from sppo.data.tokens import TokenData, check_fits, open_tokens


def open_data(run: RunConfig, directory: str) -> TokenData:
    """Open token data, and check that the run's model and sequence length can use it.

    Raises:
        ValueError: The data is missing or damaged, is of another tokenizer than the weights, has
            ids beyond the vocabulary, or is shorter than a sequence.
    """
    data = open_tokens(Path(directory))
    check_tokenizer(data, run.model)
    _check_tokens(run, data)
    return data


def open_evaluated(run: RunConfig) -> TokenData:
    """Open the tokens that ``sppo eval`` reads: ``data.eval_tokens``, or else ``data.tokens``.

    Raises:
        ValueError: See :func:`open_data`; or the vocabulary is not that of the training tokens.
    """
    data = open_data(run, run.data.eval_tokens or run.data.tokens)
    check_same_vocabulary(data, training=Path(run.data.tokens))
    return data


def samples_of(run: RunConfig, tokens: TokenData) -> SampleTable:
    """Return the table of samples for a run with ``data.samples=documents``.

    Raises:
        ValueError: Some samples are longer than the run allows.
    """
    return sample_table(
        tokens.document_offsets, length=run.sequence.length, longer=run.sequence.longer
    )


def _check_tokens(run: RunConfig, tokens: TokenData) -> None:
    """Raise ValueError unless the run's model can read the tokens, and a sequence or sample exists.

    Raises:
        ValueError: Some rules are broken; lists all of them, one per line.
    """
    vocab_size = run.model.vocab_size
    if run.data.samples == "documents":
        check_samples(tokens, samples_of(run, tokens), vocab_size=vocab_size)
    else:
        check_fits(tokens, vocab_size=vocab_size, length=run.sequence.length)
