"""Training sequences cut from the token stream.

Sequence k of length S is tokens k*S ... k*S + S of the stream: S inputs, S labels, and one token
shared with sequence k + 1. Sequences ignore document boundaries: long documents are cut, and short
ones lie side by side.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from sppo.data.order import SequenceOrder
from sppo.data.stream import counting_tokens, document_starts, few_of, read_ids
from sppo.data.tokens import TokenData
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL


def count_sequences(data: TokenData, *, length: int) -> int:
    """Return the number of sequences of ``length`` tokens in the stream; its rest is not used."""
    return (data.num_tokens - 1) // length


def training_sequence(
    data: TokenData, index: int, *, length: int, isolate_documents: bool
) -> SequenceData:
    """Cut sequence ``index`` out of the stream.

    With ``isolate_documents`` every document in the sequence is trained as if alone: attention must
    restart at ``document_starts``, and a label that would be the first token of the next document
    is :data:`IGNORED_LABEL`. Otherwise the sequence is treated as one document. In both cases,
    labels that the loss mask of the data excludes are :data:`IGNORED_LABEL`.

    Args:
        data: Open token data.
        index: Index of the sequence in [0, ``count_sequences(data, length=length)``).
        length: Number of tokens of a sequence (S).
        isolate_documents: Whether documents are isolated from each other.

    Raises:
        ValueError: An id is larger than any that was written, or a file has become shorter.
    """
    assert 0 <= index < count_sequences(data, length=length), f"no sequence {index}"
    first = index * length
    stream = torch.from_numpy(read_ids(data, first, first + length + 1))
    labels = stream[1:].clone()
    if data.loss_mask is not None:
        counts = counting_tokens(data, first + 1, first + length + 1)
        labels[torch.from_numpy(~counts)] = IGNORED_LABEL
    starts: tuple[int, ...] = (0,)
    if isolate_documents:
        # Documents that start at inputs 1 ... S-1, or at the last label, which is position S.
        begins = document_starts(data, first + 1, first + length + 1) - first
        labels[torch.from_numpy(begins - 1)] = IGNORED_LABEL
        starts = (0, *(int(begin) for begin in begins if begin < length))
    return SequenceData(tokens_S=stream[:-1], labels_S=labels, document_starts=starts)


def count_labels(data: TokenData, index: int, *, length: int, isolate_documents: bool) -> int:
    """Return the number of valid labels that :func:`training_sequence` gives sequence ``index``."""
    low, high = index * length + 1, index * length + length + 1
    begins = document_starts(data, low, high) if isolate_documents else np.empty(0, np.int64)
    if data.loss_mask is None:
        return length - len(begins)
    counts = counting_tokens(data, low, high)
    counts[begins - low] = False
    return int(np.count_nonzero(counts))


@dataclass(frozen=True, slots=True, eq=False)
class TrainingData:
    """Sequences of every step of a run.

    Has no state between calls: step t has the same sequences in a resumed run.
    """

    data: TokenData
    _: KW_ONLY
    length: int
    """Number of tokens of one sequence (S)."""
    sequences_per_step: int
    """Number of sequences of one step (B)."""
    seed: int
    shuffle: bool
    isolate_documents: bool

    def __post_init__(self) -> None:
        assert self.num_sequences >= 1, "check_fits() comes before TrainingData"

    @property
    def num_sequences(self) -> int:
        """Number of sequences in one epoch."""
        return count_sequences(self.data, length=self.length)

    @property
    def order(self) -> SequenceOrder:
        """Order of the sequences over the positions of the run."""
        return SequenceOrder(self.num_sequences, seed=self.seed, shuffle=self.shuffle)

    def epoch_of(self, step: int) -> int:
        """Return the epoch, counted from 0, of the first sequence of ``step``."""
        return self.order.epoch_of(step * self.sequences_per_step)

    def sequence_indices(self, step: int) -> tuple[int, ...]:
        """Return the indices of the B sequences of ``step``, which may span two epochs."""
        order, first = self.order, step * self.sequences_per_step
        return tuple(order.sequence_index(first + k) for k in range(self.sequences_per_step))

    def has_labels(self, step: int) -> bool:
        """Return whether ``step`` has a valid label."""
        return any(
            count_labels(
                self.data, index, length=self.length, isolate_documents=self.isolate_documents
            )
            for index in self.sequence_indices(step)
        )

    def why_no_labels(self, step: int) -> str:
        """Return why ``step`` has no valid label; called only for such a step."""
        named = few_of(self.sequence_indices(step))
        return (
            f"no label counts in sequence {named} of {self.data.directory}: {self._excluded_labels}"
        )

    @property
    def _excluded_labels(self) -> str:
        """Reason why a step may have no valid label, as text for messages."""
        first = "with data.isolate_documents the first token of a document is nobody's label"
        if self.data.loss_mask is None:
            return f"all documents there have one token, and {first}"
        also = f", and {first}" if self.isolate_documents else ""
        return f"the loss mask excludes them{also}"

    def sequence(self, index: int) -> SequenceData:
        """Return sequence ``index``, for a rank that trains only some sequences of a step."""
        return training_sequence(
            self.data, index, length=self.length, isolate_documents=self.isolate_documents
        )

    def step(self, step: int) -> tuple[SequenceData, ...]:
        """Read and return the B sequences of ``step``.

        Raises:
            ValueError: ``tokens.bin`` is damaged, or a file has become shorter.
        """
        return tuple(self.sequence(index) for index in self.sequence_indices(step))
