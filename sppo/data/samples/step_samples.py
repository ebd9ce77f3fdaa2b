"""Samples of each step of a run, a pure function of (seed, samples consumed before)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

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
        assert self.num_samples >= 1, "check_samples() comes first"
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

    def epoch_of(self, position: int) -> int:
        """Return the epoch, counted from 0, of the sample at ``position``."""
        return self.order.epoch_of(position)

    def step_samples(self, position: int) -> tuple[int, ...]:
        """Return the indices of the samples of the step that begins at ``position``, in order.

        A step at the end of an epoch continues with samples of the next epoch.

        Args:
            position: Number of samples that the run consumed before the step.
        """
        count = self.samples_per_step or self._samples_within_limit(position)
        return tuple(self.order.sequence_indices(position, count).tolist())

    def _samples_within_limit(self, position: int) -> int:
        """Return the number of samples from ``position`` on within the limits of a step, or 1."""
        looked_at = self._expected_samples
        while (count := self._count_within_limit(self._token_ends(position, looked_at))) is None:
            if looked_at >= MOST_SAMPLES:
                return MOST_SAMPLES
            looked_at *= 2
        return min(count, MOST_SAMPLES)

    @property
    def _expected_samples(self) -> int:
        """Number of samples of mean length within ``tokens_per_step``, and a few more."""
        assert self.tokens_per_step is not None, "asked for only with tokens_per_step"
        expected = self.tokens_per_step * self.num_samples // int(self.table.lengths.sum())
        return expected + expected // _SPARE + 1

    def _token_ends(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the cumulative lengths of ``count`` samples from ``position`` on, [count]."""
        samples = self.order.sequence_indices(position, count)
        return np.cumsum(self.table.lengths[samples])

    def _count_within_limit(self, ends: NDArray[np.int64]) -> int | None:
        """Return the number of samples within ``tokens_per_step``; None if ``ends`` has too few.

        Args:
            ends: [count] Cumulative lengths of the samples.
        """
        assert self.tokens_per_step is not None, "asked for only with tokens_per_step"
        within = int(np.searchsorted(ends, self.tokens_per_step, side="right"))
        return None if within == len(ends) else max(1, within)

    def lengths(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the length of each sample: the number of its inputs, and of its labels."""
        return tuple(self.table.lengths[list(samples)].tolist())
