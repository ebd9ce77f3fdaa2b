"""The samples of every step of a run that trains on documents.

The counterpart of :mod:`sppo.data.sequences` for ``data.samples=documents``: what is read, and in
which order, is a pure function of (seed, number of samples consumed before).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sppo.data.order import SequenceOrder
from sppo.data.sample_table import SampleTable
from sppo.data.stream import counting_tokens, few_of, read_ids
from sppo.data.tokens import TokenData, vocabulary_problems
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL

_BLOCK_SAMPLES = 1 << 16
_SPARE = 8


def check_samples(data: TokenData, table: SampleTable, *, vocab_size: int) -> None:
    """Check that a model can read these ids and that there is a sample to train on.

    Args:
        data: Open token data.
        table: Its samples.
        vocab_size: Rows of the model's token embedding.

    Raises:
        ValueError: every rule that is broken, one per line.
    """
    problems = list(vocabulary_problems(data, vocab_size=vocab_size))
    if table.num_samples == 0:
        problems.append(
            f"{data.directory}: none of its {data.num_documents} documents is a sample: each has "
            "one token, which has no label, or is longer than sequence.length and dropped; raise "
            "sequence.length, write sequence.longer=cut, or prepare other data"
        )
    if problems:
        raise ValueError("\n".join(problems))


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSamples:
    """The samples of every step of a run.

    Nothing is kept between calls: a resumed run asks for the step at its position, the number of
    samples consumed before it, and gets what the first one got.
    """

    data: TokenData
    table: SampleTable
    _: KW_ONLY
    seed: int
    shuffle: bool
    samples_per_step: int | None = None
    """Samples of a step; None where ``tokens_per_step`` limits them."""
    tokens_per_step: int | None = None
    """Most tokens of a step; a step has at least one sample."""

    def __post_init__(self) -> None:
        assert self.num_samples >= 1, "check_samples() comes before DocumentSamples"
        given = (self.samples_per_step, self.tokens_per_step)
        assert given.count(None) == 1, f"samples_per_step, tokens_per_step: {given}"

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return self.table.num_samples

    @property
    def order(self) -> SequenceOrder:
        """Which sample comes at each position of the run."""
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

    def position_of_step(self, step: int) -> int:
        """Samples consumed before ``step``, from 0.

        With ``tokens_per_step`` all steps before it are gone through: a second for some ten million
        samples.
        """
        if self.samples_per_step is not None:
            return step * self.samples_per_step
        position, ends = 0, np.empty(0, dtype=np.int64)
        while step:
            count = self._count_within_limit(ends)
            if count is None:
                looked_at = min(_BLOCK_SAMPLES, step * self._expected_samples)
                ends = self._token_ends(position, max(looked_at, 2 * len(ends)))
                continue
            position, ends = position + count, ends[count:] - ends[count - 1]
            step -= 1
        return position

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

    def num_labels(self, samples: Sequence[int]) -> int:
        """Labels that count, of all the samples."""
        if self.data.loss_mask is None:
            return sum(self.lengths(samples))
        return sum(int(np.count_nonzero(self._counts(sample))) for sample in samples)

    def has_labels(self, position: int) -> bool:
        """Return whether any label of the step at ``position`` counts."""
        return any(self.num_labels([sample]) for sample in self.step_samples(position))

    def why_no_labels(self, position: int) -> str:
        """Return why no label of the step at ``position`` counts, for a step without any."""
        named = few_of(self.step_samples(position))
        where = f"no label counts in sample {named} of {self.data.directory}"
        return f"{where}: the loss mask excludes them"

    def row(self, samples: Sequence[int]) -> SequenceData:
        """One sequence of the samples one after another, each isolated from the others.

        Attention and positions are to start anew at ``document_starts``, the first token of every
        sample. Labels that the loss mask excludes are :data:`IGNORED_LABEL`.

        Raises:
            ValueError: an id that cannot be in this data, or a file that has become shorter.
        """
        assert samples, "a row has at least one sample"
        parts = [self._ids(sample) for sample in samples]
        labels = [
            np.where(self._counts(sample), ids[1:], IGNORED_LABEL)
            for sample, ids in zip(samples, parts, strict=True)
        ]
        ends = np.cumsum(self.lengths(samples))
        return SequenceData(
            tokens_S=torch.from_numpy(np.concatenate([ids[:-1] for ids in parts])),
            labels_S=torch.from_numpy(np.concatenate(labels)),
            document_starts=(0, *ends[:-1].tolist()),
        )

    def _ids(self, sample: int) -> NDArray[np.int64]:
        """Inputs of a sample and its last label, int64 [length + 1]."""
        start = int(self.table.starts[sample])
        return read_ids(self.data, start, start + int(self.table.lengths[sample]) + 1)

    def _counts(self, sample: int) -> NDArray[np.bool_]:
        """Whether each label of a sample counts, bool [length]."""
        start = int(self.table.starts[sample])
        return counting_tokens(self.data, start + 1, start + int(self.table.lengths[sample]) + 1)
