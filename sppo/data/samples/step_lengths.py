"""Lengths of the samples of a few steps, for planning before a run. Torch is not needed."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np

from sppo.config.problems import nearest
from sppo.config.run import RunConfig
from sppo.data.samples.length_distributions import DISTRIBUTIONS, draw
from sppo.data.samples.run_samples import (
    order_of,
    run_samples,
    steps_of,
    table_of,
    why_no_sample,
)
from sppo.data.samples.sample_table import StepSamples, no_samples_problem, sample_table
from sppo.data.tokens import TOKENS_FILE, TokenData, open_tokens
from sppo.planning.corpus.search import DrawnSteps
from sppo.quoting import quoted

DRAWN_STEPS = 3
_DOCUMENTS = 1 << 16
"""Number of documents drawn from a distribution; the samples of steps are drawn from these."""


def drawn_steps(run: RunConfig, *, distribution: str | None = None) -> DrawnSteps:
    """Draw the samples of a few steps of a run of documents, the same for the same arguments.

    With token data these are the first steps of a shuffled run. They are shuffled even if
    ``data.shuffle`` is false, because documents may be ordered by length.

    Args:
        run: Run configuration with ``data.samples=documents``.
        distribution: Name in :data:`DISTRIBUTIONS` of a distribution to draw documents from; None
            for the documents of the run's token data.

    Raises:
        ValueError: The name is unknown, or there is no token data, or there is no sample.
        OSError: Token data cannot be read.
    """
    run = run.with_values({"data.shuffle": True})
    if distribution is not None:
        samples, source = _drawn_samples(run, distribution), distribution
        description = DISTRIBUTIONS[distribution].source
    else:
        named = run.data.directories
        tokens = [_opened(run, key, Path(directory)) for key, directory in named.items()]
        samples, source = run_samples(run, tokens), ", ".join(named.values())
        description = f"{sum(one.num_documents for one in tokens)} documents of {source}"
    lengths = tuple(map(samples.lengths, islice(samples.steps(), DRAWN_STEPS)))
    return DrawnSteps(source, description, lengths)


def drawn_steps_if_there(run: RunConfig) -> DrawnSteps | None:
    """Draw steps from the token data of a run of documents; return None if there is no data."""
    directories = map(Path, run.data.directories.values())
    there = all((directory / TOKENS_FILE).is_file() for directory in directories)
    return drawn_steps(run) if there else None


def _drawn_samples(run: RunConfig, distribution: str) -> StepSamples:
    """Return the samples of a run whose documents have lengths of a distribution."""
    if distribution not in DISTRIBUTIONS:
        raise ValueError(
            f"--lengths {quoted(distribution)}: no such distribution of lengths; there are "
            f"{', '.join(DISTRIBUTIONS)}.{nearest(distribution, DISTRIBUTIONS)}"
        )
    run = run.with_values({"data.sources": None})
    lengths = np.array(draw(distribution, _DOCUMENTS, seed=run.train.seed), dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    table = sample_table(offsets, length=run.sequence.length, longer=run.sequence.longer)
    if table.num_samples == 0:
        raise ValueError(no_samples_problem(distribution, offsets))
    return steps_of(run, table, order_of(run, [table]))


def _opened(run: RunConfig, key: str, directory: Path) -> TokenData:
    """Open the token data that a key of a run names, which must have a sample."""
    if not directory.is_dir():
        raise ValueError(
            f"{key} {directory}: not there, and how long samples are decides the plan of "
            "data.samples=documents; run sppo data prepare, or name a distribution of lengths: "
            f"--lengths {'|'.join(DISTRIBUTIONS)}"
        )
    tokens = open_tokens(directory)
    if table_of(run, tokens).num_samples == 0:
        raise ValueError(why_no_sample(run, tokens))
    return tokens
