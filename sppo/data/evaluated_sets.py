"""Token data of the sets that are evaluated while a run trains. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sppo.config import RunConfig
from sppo.config.validation import ValidationSet
from sppo.data.run_tokens import check_same_vocabulary, open_data
from sppo.data.samples.run_samples import table_of
from sppo.data.tokens import TOKENS_FILE, TokenData, open_tokens
from sppo.planning.validation_plan import SetSamples, run_of_set


def open_set(run: RunConfig, name: str) -> TokenData:
    """Open the tokens of a set, and check that the run's model can evaluate them.

    Args:
        run: Validated run configuration.
        name: Name of the set.

    Raises:
        ValueError: The data is missing or damaged, has another vocabulary than the training tokens,
            or is shorter than a sequence.
    """
    own = run.evaluated_sets[name]
    data = open_data(run_of_set(run, own), own.tokens)
    key, training = next(iter(run.data.directories.items()))
    check_same_vocabulary(data, Path(training), keys=(set_key(name), key))
    return data


def set_key(name: str) -> str:
    """Return the key of the run file that names the tokens of a set."""
    return f"validation.sets.{name}.tokens"


def evaluated_samples(run: RunConfig) -> Mapping[str, SetSamples]:
    """Return what is evaluated of each set.

    A set whose tokens are not there, or have no sample, counts as sequences of full length: as many
    as are evaluated, or one.
    """
    return {name: _samples(run_of_set(run, own), own) for name, own in run.evaluated_sets.items()}


def _samples(run: RunConfig, own: ValidationSet) -> SetSamples:
    full = [run.sequence.length] * (own.sequences or 1)
    if not (Path(own.tokens) / TOKENS_FILE).is_file():
        return SetSamples(full, sum(full))
    data = open_tokens(own.tokens)
    table = table_of(run, data)
    lengths = table.lengths[: own.sequences].tolist()
    if not lengths:
        return SetSamples(full, sum(full))
    if data.loss_mask is None:
        return SetSamples(lengths, sum(lengths))
    firsts = (int(start) + 1 for start in table.starts[: len(lengths)])
    spans = zip(firsts, lengths, strict=True)
    labels = sum(int(np.count_nonzero(data.counts(a, a + length))) for a, length in spans)
    return SetSamples(lengths, labels)
