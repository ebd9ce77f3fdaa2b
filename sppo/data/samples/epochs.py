"""Length of a run in epochs."""

from __future__ import annotations

import math
from fractions import Fraction

from sppo.config import RunConfig
from sppo.config.rules import broken_rules
from sppo.data.samples.run_samples import run_samples
from sppo.data.tokens import open_tokens


def with_steps(run: RunConfig) -> RunConfig:
    """Return a run with ``train.steps`` in place of ``train.epochs``.

    The steps are the fewest that train on every sequence or sample so many times; the last step
    may begin one more epoch. A run without epochs is returned as it is.

    Raises:
        ValueError: The token data cannot be used, or the run of so many steps breaks a rule.
    """
    if run.train.epochs is None:
        return run
    samples = run_samples(run, [open_tokens(path) for path in run.data.directories.values()])
    needed = Fraction(repr(run.train.epochs)) * samples.num_samples
    steps = samples.num_steps(max(1, math.ceil(needed)))
    counted = run.with_values({"train.steps": steps, "train.epochs": None})
    problems = list(broken_rules(counted))
    if problems:
        why = "; ".join(f"{one.path}={one.value}: {one.rule}" for one in problems)
        raise ValueError(f"train.epochs {run.train.epochs:g} are {steps} steps: {why}")
    return counted
