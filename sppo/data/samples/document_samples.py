"""Samples of every step of a run that trains on documents, with their tokens.

Counterpart of :mod:`sppo.data.sequences` for ``data.samples=documents``: the samples and their
order are a pure function of (seed, number of samples consumed before).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sppo.data.samples.step_samples import StepSamples
from sppo.data.stream import counting_tokens, few_of, read_ids
from sppo.data.tokens import TokenData
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSamples(StepSamples):
    """Samples of every step of a run, with their tokens."""

    data: TokenData
    """Open token data that holds the samples."""

    def num_labels(self, samples: Sequence[int]) -> int:
        """Return the number of valid labels of some samples."""
        if self.data.loss_mask is None:
            return sum(self.lengths(samples))
        return sum(int(np.count_nonzero(self._counts(sample))) for sample in samples)

    def has_labels(self, position: int) -> bool:
        """Return whether the step at ``position`` has a valid label."""
        return any(self.num_labels([sample]) for sample in self.step_samples(position))

    def why_no_labels(self, position: int) -> str:
        """Return why the step at ``position`` has no valid label; called only for such a step."""
        named = few_of(self.step_samples(position))
        where = f"no label counts in sample {named} of {self.data.directory}"
        return f"{where}: the loss mask excludes them"

    def row(self, samples: Sequence[int]) -> SequenceData:
        """Return the packed sequence of some samples, each isolated from the others.

        Attention and positions must restart at ``document_starts``, the first token of every
        sample. Labels that the loss mask excludes are :data:`IGNORED_LABEL`.

        Raises:
            ValueError: An id is larger than any that was written, or a file has become shorter.
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
        """Return the inputs of a sample and its last label, int64 [length + 1]."""
        start = int(self.table.starts[sample])
        return read_ids(self.data, start, start + int(self.table.lengths[sample]) + 1)

    def _counts(self, sample: int) -> NDArray[np.bool_]:
        """Return the loss mask of a sample's labels, bool [length]."""
        start = int(self.table.starts[sample])
        return counting_tokens(self.data, start + 1, start + int(self.table.lengths[sample]) + 1)
