"""Samples of each step of a run, a pure function of (seed, samples consumed before)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from sppo.config.base import MOST_SAMPLES
from sppo.data.order import SequenceOrder
from sppo.data.samples.sample_table import SampleTable

_SPARE = 8


@dataclass(frozen=True, slots=True, eq=False)
class StepSamples:
    """Samples of every step, as indices into a table.

    Has no state between calls: a step depends only on its position, the number of samples that the
    run consumed before, so a resumed run gets the same steps.
    """

    table: SampleTable
    _: KW_ONLY
    seed: int
    shuffle: bool
    samples_per_step: int | None = None
    """Number of samples of a step; None if ``tokens_per_step`` limits a step."""
    tokens_per_step: int | None = None
    """Largest number of tokens of a step, which has at least one sample; None for no limit."""

    def __post_init__(self) -> None:
        assert self.num_samples >= 1, "check_tokens() comes first"
        given = (self.samples_per_step, self.tokens_per_step)
        assert given.count(None) == 1, f"samples_per_step, tokens_per_step: {given}"

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""
        return self.table.num_samples

    @property
    def order(self) -> SequenceOrder:
        """Order of the samples over the positions of the run."""
        return SequenceOrder(self.num_samples, seed=self.seed, shuffle=self.shuffle)

    def step_samples(self, position: int) -> tuple[int, ...]:
        """Return the indices of the samples of the step that begins at ``position``, in order.

        A step at the end of an epoch continues with samples of the next epoch.

        Args:
            position: Number of samples that the run consumed before the step.
        """
        count = self.samples_per_step or self._samples_within_limit(position)
        return tuple(self.order.sequence_indices(position, count).tolist())

    def steps(self) -> Iterator[tuple[int, ...]]:
        """Yield the samples of each step from the beginning of the run on, without an end."""
        position = 0
        while True:
            samples = self.step_samples(position)
            yield samples
            position += len(samples)

    def _samples_within_limit(self, position: int) -> int:
        """Return the number of samples from ``position`` on within the limits of a step, or 1."""
        limit = self.tokens_per_step
        assert limit is not None, "asked for only with tokens_per_step"
        expected = limit * self.num_samples // int(self.table.lengths.sum())
        looked_at = expected + expected // _SPARE + 1
        while True:
            samples = self.order.sequence_indices(position, looked_at)
            ends = np.cumsum(self.table.lengths[samples])
            within = int(np.searchsorted(ends, limit, side="right"))
            if within < looked_at or looked_at >= MOST_SAMPLES:
                return min(max(1, within), MOST_SAMPLES)
            looked_at *= 2

    def lengths(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the length of each sample: the number of its inputs, and of its labels."""
        return tuple(self.table.lengths[list(samples)].tolist())
