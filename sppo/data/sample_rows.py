"""Samples of every step of a run, with their tokens and labels.

A sample of T tokens that begins at position p of the token data has the tokens p to p + T - 1 and
the labels p + 1 to p + T: the label of a token is the token after it. Sample k of a stream that is
cut into sequences of S tokens begins at k S; a sample of documents begins where its document does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from sppo.config import RunConfig
from sppo.data.samples.run_samples import run_samples, with_tokens
from sppo.data.samples.sample_table import StepSamples
from sppo.data.tokens import TokenData
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL

_NAMED = 4


@dataclass(frozen=True, slots=True, eq=False)
class TrainingData(StepSamples):
    """Samples of every step of a run, with their tokens."""

    sources: tuple[TokenData, ...]
    """Open token data of each source that holds samples; one unless the run has a mixture."""
    isolate_documents: bool = False
    """Whether each document within a sample of the stream is trained on as if alone: attention
    restarts at its first token, which is nobody's label."""

    @classmethod
    def of(cls, run: RunConfig, data: TokenData) -> Self:
        """Return the samples of token data as a run cuts them, in the order of data on its own.

        Raises:
            ValueError: Some samples are longer than the run allows.
        """
        return cls.of_sources(with_tokens(run, data), [data])

    @classmethod
    def of_sources(cls, run: RunConfig, sources: Sequence[TokenData]) -> Self:
        """Return the training data of a run, given the open token data of its sources.

        Raises:
            ValueError: Some samples are longer than the run allows.
        """
        steps = run_samples(run, sources)
        return cls(
            steps.table,
            steps.order,
            tuple(sources),
            samples_per_step=steps.samples_per_step,
            tokens_per_step=steps.tokens_per_step,
            isolate_documents=run.data.samples == "stream" and run.data.isolate_documents,
        )

    def num_labels(self, samples: Sequence[int]) -> int:
        """Return the number of valid labels of some samples."""
        if not self._has_loss_mask and not self.isolate_documents:
            return sum(self.lengths(samples))
        return sum(int(np.count_nonzero(self._counts(sample))) for sample in samples)

    def has_labels(self, position: int) -> bool:
        """Return whether the step at ``position`` has a valid label."""
        return any(self.num_labels([sample]) for sample in self.step_samples(position))

    def why_no_labels(self, position: int) -> str:
        """Return why the step at ``position`` has no valid label; called only for such a step."""
        samples = self.step_samples(position)
        named = ", ".join(map(str, samples[:_NAMED]))
        more = f" and {len(samples) - _NAMED} more" * (len(samples) > _NAMED)
        first = "with data.isolate_documents the first token of a document is nobody's label"
        if not self._has_loss_mask:
            why = f"all documents there have one token, and {first}"
        else:
            why = "the loss mask excludes them" + f", and {first}" * self.isolate_documents
        directories = ", ".join(str(source.directory) for source in self.sources)
        where = f"{self.table.noun} {named}{more} of {directories}"
        return f"no label counts in {where}: {why}"

    def check_labels(self, *, steps: int) -> None:
        """Raise ValueError if no step has a valid label; stops at the first step that has one.

        Documents of a single token have none, so a stream of these alone is not walked through.

        Args:
            steps: Number of steps of the run.
        """
        if not self._has_loss_mask and not self.isolate_documents:
            return
        consumed = 0
        are_single = all(one.num_documents >= one.num_tokens for one in self.sources)
        for samples in islice(self.steps(), 0 if are_single else steps):
            if self.has_labels(consumed):
                return
            consumed += len(samples)
            if consumed >= self.order.covering:  # further steps have the same samples
                break
        fix = (
            "Prepare the data again, with a loss mask that is true for what is to be learnt"
            if self._has_loss_mask
            else "Set data.isolate_documents=false, or prepare longer documents"
        )
        raise ValueError(
            f"{self.why_no_labels(0)}, and so it is in every step: there is nothing to learn "
            f"from. {fix}"
        )

    def row(self, samples: Sequence[int]) -> SequenceData:
        """Return the packed sequence of some samples, each isolated from the others.

        Attention and positions must restart at ``document_starts``: the first token of every
        sample, and of every isolated document. Labels that do not count are
        :data:`IGNORED_LABEL`.

        Raises:
            ValueError: An id is larger than any that was written, or a file has become shorter.
        """
        assert samples, "a row has at least one sample"
        tokens, labels, starts = [], [], []
        begin = 0
        for sample, length in zip(samples, self.lengths(samples), strict=True):
            source, first = self._place(sample)
            ids = source.ids(first, first + length + 1)
            tokens.append(ids[:-1])
            labels.append(np.where(self._counts(sample), ids[1:], IGNORED_LABEL))
            inner = self._inner_starts(sample) - first
            # A document that begins at the last label has no token in the sample.
            starts += [begin, *(begin + inner[inner < length]).tolist()]
            begin += length
        return SequenceData(
            tokens_S=torch.from_numpy(np.concatenate(tokens)),
            labels_S=torch.from_numpy(np.concatenate(labels)),
            document_starts=tuple(starts),
        )

    @property
    def _has_loss_mask(self) -> bool:
        return any(source.loss_mask is not None for source in self.sources)

    def _place(self, sample: int) -> tuple[TokenData, int]:
        """Return the source of a sample, and the position of its first token in the source."""
        return self.sources[self.table.source_of(sample)], int(self.table.starts[sample])

    def _counts(self, sample: int) -> NDArray[np.bool_]:
        """Return which labels of a sample are valid, bool [length]."""
        source, first = self._place(sample)
        counts = source.counts(first + 1, first + 1 + int(self.table.lengths[sample]))
        counts[self._inner_starts(sample) - first - 1] = False
        return counts

    def _inner_starts(self, sample: int) -> NDArray[np.int64]:
        """Return the positions in the source of the sample's labels that begin a document, int64.

        Empty unless documents are isolated.
        """
        if not self.isolate_documents:
            return np.empty(0, dtype=np.int64)
        source, first = self._place(sample)
        return source.document_starts(first + 1, first + 1 + int(self.table.lengths[sample]))
