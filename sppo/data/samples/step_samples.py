"""Samples of each step of a run: a pure function of (seed, samples consumed before)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from sppo.data.order import SequenceOrder
from sppo.data.samples.sample_table import SampleTable

_SPARE = 8


@dataclass(frozen=True, slots=True, eq=False)
class StepSamples:
    """The samples of every step, by their places in a table.

    Nothing is kept between calls: a resumed run asks for the step at its position, the number of
    samples consumed before it, and gets what the first one got.
    """

    table: SampleTable
    _: KW_ONLY
    seed: int
    shuffle: bool
    samples_per_step: int | None = None
    """Samples of a step; None where ``tokens_per_step`` limits them."""
    tokens_per_step: int | None = None
    """Most tokens of a step; a step has at least one sample."""

    def __post_init__(self) -> None:
        assert self.num_samples >= 1, "check_samples() comes first"
        given = (self.samples_per_step, self.tokens_per_step)
        assert given.count(None) == 1, f"samples_per_step, tokens_per_step: {given}"

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return self.table.num_samples

    @property
    def order(self) -> SequenceOrder:
        """Return the order of samples over the positions of the run."""
        return SequenceOrder(self.num_samples, seed=self.seed, shuffle=self.shuffle)

    def epoch_of(self, position: int) -> int:
        """Epoch of the sample at ``position``, from 0."""
        return self.order.epoch_of(position)

    def step_samples(self, position: int) -> tuple[int, ...]:
        """The samples of the step that begins at ``position``, in the order of the epoch.

        A step at the end of an epoch runs on into the next one.

        Args:
            position: Samples consumed by the run before this step.
        """
        count = self.samples_per_step or self._samples_within_limit(position)
        return tuple(self.order.sequence_indices(position, count).tolist())

    def _samples_within_limit(self, position: int) -> int:
        """Samples of the step at ``position`` as far as ``tokens_per_step`` goes, at least one."""
        looked_at = self._expected_samples
        while (count := self._count_within_limit(self._token_ends(position, looked_at))) is None:
            looked_at *= 2
        return count

    @property
    def _expected_samples(self) -> int:
        """Samples that ``tokens_per_step`` takes at the mean length, and a few more."""
        assert self.tokens_per_step is not None, "asked for only with tokens_per_step"
        expected = self.tokens_per_step * self.num_samples // int(self.table.lengths.sum())
        return expected + expected // _SPARE + 1

    def _token_ends(self, position: int, count: int) -> NDArray[np.int64]:
        """Tokens of the samples from ``position`` up to each of ``count``, that one included."""
        samples = self.order.sequence_indices(position, count)
        return np.cumsum(self.table.lengths[samples])

    def _count_within_limit(self, ends: NDArray[np.int64]) -> int | None:
        """Samples that ``tokens_per_step`` takes, None where ``ends`` do not tell."""
        assert self.tokens_per_step is not None, "asked for only with tokens_per_step"
        within = int(np.searchsorted(ends, self.tokens_per_step, side="right"))
        return None if within == len(ends) else max(1, within)

    def lengths(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Tokens of each sample: its inputs, as many as its labels."""
        return tuple(self.table.lengths[list(samples)].tolist())
