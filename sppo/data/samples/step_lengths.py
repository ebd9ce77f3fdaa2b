"""Lengths of the samples of a few steps, for planning before a run. Torch is not needed."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sppo.config.problems import nearest
from sppo.config.run import RunConfig
from sppo.data.samples.length_distributions import DISTRIBUTIONS, draw
from sppo.data.samples.sample_table import StepSamples, no_samples_problem, sample_table
from sppo.data.tokens import TOKENS_FILE, open_tokens
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
            for the documents of ``data.tokens``.

    Raises:
        ValueError: The name is unknown, or there is no token data, or there is no sample.
        OSError: Token data cannot be read.
    """
    offsets, source, description = _documents(run, distribution)
    table = sample_table(offsets, length=run.sequence.length, longer=run.sequence.longer)
    if table.num_samples == 0:
        raise ValueError(no_samples_problem(source, offsets))
    samples = StepSamples(
        table,
        seed=run.train.seed,
        shuffle=True,
        samples_per_step=run.train.samples_per_step,
        tokens_per_step=run.train.tokens_per_step,
    )
    lengths = tuple(map(samples.lengths, islice(samples.steps(), DRAWN_STEPS)))
    return DrawnSteps(source, description, lengths)


def drawn_steps_if_there(run: RunConfig) -> DrawnSteps | None:
    """Draw steps from the token data of a run of documents; return None if there is no data."""
    return drawn_steps(run) if (Path(run.data.tokens) / TOKENS_FILE).is_file() else None


def _documents(run: RunConfig, distribution: str | None) -> tuple[NDArray[np.int64], str, str]:
    """Return (document starts, then the number of tokens; name of the source; description)."""
    if distribution is not None:
        if distribution not in DISTRIBUTIONS:
            raise ValueError(
                f"--lengths {quoted(distribution)}: no such distribution of lengths; there are "
                f"{', '.join(DISTRIBUTIONS)}.{nearest(distribution, DISTRIBUTIONS)}"
            )
        lengths = np.array(draw(distribution, _DOCUMENTS, seed=run.train.seed), dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
        return offsets, distribution, DISTRIBUTIONS[distribution].source
    directory = Path(run.data.tokens)
    if not directory.is_dir():
        raise ValueError(
            f"data.tokens {directory}: not there, and how long samples are decides the plan of "
            "data.samples=documents; run sppo data prepare, or name a distribution of lengths: "
            f"--lengths {'|'.join(DISTRIBUTIONS)}"
        )
    tokens = open_tokens(directory)
    described = f"{tokens.num_documents} documents of {directory}"
    return tokens.document_offsets, str(directory), described
