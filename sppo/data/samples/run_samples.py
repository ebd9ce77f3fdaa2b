"""Samples of every step of a run, without their tokens. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from sppo.config import RunConfig
from sppo.data.mixture_order import MixtureOrder, draws_of_block, seed_of_source
from sppo.data.order import Order, SequenceOrder
from sppo.data.samples.sample_table import (
    SampleTable,
    StepSamples,
    joined_table,
    no_samples_problem,
    sample_table,
    stream_table,
)
from sppo.data.tokens import TokenData


def run_samples(run: RunConfig, sources: Sequence[TokenData]) -> StepSamples:
    """Return the samples of every step of a run.

    Args:
        run: Run configuration.
        sources: Open token data of each of ``run.data.directories``.

    Raises:
        ValueError: Some samples are longer than the run allows, or the weight of a source is too
            small.
    """
    tables = [table_of(run, source) for source in sources]
    return steps_of(run, joined_table(tables), order_of(run, tables))


def steps_of(run: RunConfig, table: SampleTable, order: Order) -> StepSamples:
    """Return the samples of every step of a run, given its samples and their order."""
    train, is_stream = run.train, run.data.samples == "stream"
    return StepSamples(
        table,
        order,
        samples_per_step=train.sequences_per_step if is_stream else train.samples_per_step,
        tokens_per_step=train.tokens_per_step,
    )


def table_of(run: RunConfig, tokens: TokenData) -> SampleTable:
    """Return the table of the samples of token data, as a run cuts them.

    Raises:
        ValueError: Some samples are longer than the run allows.
    """
    length, longer = run.sequence.length, run.sequence.longer
    if run.data.samples == "stream":
        return stream_table(tokens.num_tokens, length=length)
    if tokens.meta.is_chat and "longer" not in run.sequence.model_fields_set:
        longer = "refuse"  # the end of a chat, which is cut off, is what is learnt
    return sample_table(tokens.document_offsets, length=length, longer=longer)


def why_no_sample(run: RunConfig, tokens: TokenData) -> str:
    """Return why token data has no sample, and what to change."""
    if run.data.samples == "documents":
        return no_samples_problem(tokens.directory, np.asarray(tokens.document_offsets))
    length, shorter = run.sequence.length, tokens.num_tokens - 1
    fix = f"Set its length to at most {shorter}, or prepare" if shorter else "Prepare"
    return (
        f"{tokens.directory}: {tokens.num_tokens} tokens, but a sequence of {length} "
        f"needs {length + 1} (inputs, and labels one token on). {fix} more data"
    )


def order_of(run: RunConfig, tables: Sequence[SampleTable]) -> Order:
    """Return the order of the samples of a run, given the table of each of its sources.

    Raises:
        ValueError: The weight of a source is too small.
    """
    seed, shuffle, mixture = run.train.seed, run.data.shuffle, run.data.sources
    if mixture is None:
        (table,) = tables
        return SequenceOrder(table.num_samples, seed=seed, shuffle=shuffle)
    shares = [Fraction(source.weight) for source in mixture.values()]
    if run.data.weights == "tokens":
        means = [Fraction(int(t.lengths.sum()), t.num_samples) for t in tables]
        shares = [share / mean for share, mean in zip(shares, means, strict=True)]
    draws = draws_of_block(shares)
    for name, number in zip(mixture, draws, strict=True):
        if not number:
            raise ValueError(
                f"data.sources.{name}.weight {mixture[name].weight:g}: less than one of "
                f"{sum(draws)} samples; raise it, or leave the source out"
            )
    orders = [
        SequenceOrder(table.num_samples, seed=seed_of_source(seed, name), shuffle=shuffle)
        for name, table in zip(mixture, tables, strict=True)
    ]
    return MixtureOrder(tuple(orders), draws, seed=seed)


def with_tokens(run: RunConfig, data: TokenData) -> RunConfig:
    """Return the run as if it were trained on some token data alone."""
    return run.with_values({"data.tokens": str(data.directory), "data.sources": None})
