"""Share of the tokens of a run whose label counts, by which the head is planned. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sppo.config.run import RunConfig
from sppo.data.samples.run_samples import run_samples
from sppo.data.samples.sample_table import StepSamples
from sppo.data.tokens import TOKENS_FILE, TokenData, open_tokens

_MOST_TOKENS = 1 << 24
"""Tokens after which the loss mask of no further step is read."""
_DIGITS = 4


def with_label_share_if_there(run: RunConfig) -> RunConfig:
    """Return a run with the share of its token data, or unchanged if that is not there.

    Raises:
        ValueError: The data is damaged.
    """
    directories = [*map(Path, run.data.directories.values())]
    if not all((directory / TOKENS_FILE).is_file() for directory in directories):
        return run
    sources = [open_tokens(directory) for directory in directories]
    if not _has_loss_mask(sources):
        return run
    return with_label_share(run, run_samples(run, sources), sources)


def with_label_share(
    run: RunConfig, samples: StepSamples, sources: Sequence[TokenData]
) -> RunConfig:
    """Return a run with ``data.label_share`` of its first steps, unless it has one.

    A run without a loss mask is returned unchanged.

    Args:
        run: Run configuration.
        samples: Samples of every step of the run.
        sources: Open token data of each source.
    """
    if run.data.label_share is not None or not _has_loss_mask(sources):
        return run
    tokens = labels = consumed = 0
    for step in samples.steps():
        for sample, length in zip(step, samples.lengths(step), strict=True):
            source = sources[samples.table.source_of(sample)]
            first_label = int(samples.table.starts[sample]) + 1
            labels += int(np.count_nonzero(source.counts(first_label, first_label + length)))
            tokens += length
        consumed += len(step)
        if tokens >= _MOST_TOKENS or consumed >= samples.order.covering:
            break
    share = max(round(labels / tokens, _DIGITS), 10**-_DIGITS)
    return run.with_values({"data.label_share": share})


def _has_loss_mask(sources: Sequence[TokenData]) -> bool:
    return any(source.loss_mask is not None for source in sources)
