"""Opening of the token data that a run names, checked against its model. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sppo.config import RunConfig
from sppo.data.preparation.model_tokenizer import check_same_vocabulary, check_tokenizer
from sppo.data.samples.sample_table import (
    SampleTable,
    no_samples_problem,
    sample_table,
    stream_table,
)
from sppo.data.tokens import TokenData, open_tokens


def open_data(run: RunConfig, directory: str) -> TokenData:
    """Open token data, and check that the run's model and sequence length can use it.

    Raises:
        ValueError: The data is missing or damaged, is of another tokenizer than the weights, has
            ids beyond the vocabulary, or is shorter than a sequence.
    """
    data = open_tokens(Path(directory))
    check_tokenizer(data, run.model)
    check_tokens(run, data)
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
    """Return the table of the samples of a run.

    Raises:
        ValueError: Some samples are longer than the run allows.
    """
    length, longer = run.sequence.length, run.sequence.longer
    if run.data.samples == "stream":
        return stream_table(tokens.num_tokens, length=length)
    return sample_table(tokens.document_offsets, length=length, longer=longer)


def check_tokens(run: RunConfig, tokens: TokenData) -> None:
    """Raise ValueError unless the run's model can read the tokens, and there is a sample.

    Raises:
        ValueError: Some rules are broken; lists all of them, one per line.
    """
    problems = []
    meta, vocab_size = tokens.meta, run.model.vocab_size
    if meta.max_id >= vocab_size:
        problems.append(
            f"{tokens.directory}: ids up to {meta.max_id} (tokenizer {meta.tokenizer.name}, "
            f"vocabulary of {meta.vocab_size}), but model.vocab_size is {vocab_size}; an id must "
            f"be below it. Set model.vocab_size to at least {meta.max_id + 1}, or prepare the data "
            "with the model's tokenizer"
        )
    if samples_of(run, tokens).num_samples == 0:
        problems.append(_why_no_sample(run, tokens))
    if problems:
        raise ValueError("\n".join(problems))


def _why_no_sample(run: RunConfig, tokens: TokenData) -> str:
    """Return why token data has no sample, and what to change."""
    if run.data.samples == "documents":
        return no_samples_problem(tokens.directory, np.asarray(tokens.document_offsets))
    length, shorter = run.sequence.length, tokens.num_tokens - 1
    fix = f"Set sequence.length to at most {shorter}, or prepare" if shorter else "Prepare"
    return (
        f"{tokens.directory}: {tokens.num_tokens} tokens, but a sequence of sequence.length "
        f"{length} needs {length + 1} (inputs, and labels one token on). {fix} more data"
    )
