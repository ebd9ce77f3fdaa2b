"""Sequences that an evaluation runs forward, from the token stream or from packed samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sppo.config import RunConfig
from sppo.data.run_tokens import samples_of
from sppo.data.samples.document_samples import DocumentSamples
from sppo.data.sequences import count_sequences, training_sequence
from sppo.data.tokens import TokenData
from sppo.engine.unit import SequenceData
from sppo.planning.partition import lengths_of


@dataclass(frozen=True, slots=True)
class EvaluatedSequence:
    """One sequence of an evaluation.

    Attributes:
        sequence: Tokens and labels.
        boundaries: Boundaries of the subsequences.
        count: Number of samples packed in the sequence; 1 for a sequence of the stream.
    """

    sequence: SequenceData
    boundaries: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class EvaluatedSequences:
    """All sequences of an evaluation.

    Attributes:
        count: Number of sequences of the stream, or of samples.
        parts: Evaluated sequences in order, read lazily.
    """

    count: int
    parts: Iterator[EvaluatedSequence]


def evaluated_sequences(
    run: RunConfig, data: TokenData, *, boundaries: tuple[int, ...], most: int | None
) -> EvaluatedSequences:
    """Return the sequences of an evaluation; the data is read while they are iterated over.

    Args:
        run: Validated run configuration.
        data: Token data to evaluate.
        boundaries: Subsequence boundaries of a sequence of the run's full length.
        most: Largest number of sequences or samples, taken from the start of the data; None for
            all.
    """
    if run.data.samples == "documents":
        samples = DocumentSamples(
            samples_of(run, data), data, seed=0, shuffle=False, samples_per_step=1
        )
        count = samples.num_samples if most is None else min(most, samples.num_samples)
        parts = _packed(samples, count, tokens=max(lengths_of(boundaries)))
        return EvaluatedSequences(count, parts)
    count = count_sequences(data, length=run.sequence.length)
    count = count if most is None else min(most, count)
    return EvaluatedSequences(count, _stream(run, data, count, boundaries))


def _stream(
    run: RunConfig, data: TokenData, count: int, boundaries: tuple[int, ...]
) -> Iterator[EvaluatedSequence]:
    length, isolate = run.sequence.length, run.data.isolate_documents
    for index in range(count):
        sequence = training_sequence(data, index, length=length, isolate_documents=isolate)
        yield EvaluatedSequence(sequence, boundaries, 1)


def _packed(samples: DocumentSamples, count: int, *, tokens: int) -> Iterator[EvaluatedSequence]:
    """Yield sequences of at most `tokens` tokens of whole samples, and longer samples alone.

    Samples keep their order; a sample of more than `tokens` tokens is cut into subsequences.
    """
    waiting: list[int] = []
    room = tokens
    for index, length in enumerate(samples.lengths(range(count))):
        if waiting and length > room:
            yield _sequence(samples, waiting, tokens)
            waiting, room = [], tokens
        waiting.append(index)
        room -= length
    if waiting:
        yield _sequence(samples, waiting, tokens)


def _sequence(samples: DocumentSamples, own: Sequence[int], tokens: int) -> EvaluatedSequence:
    sequence = samples.row(own)
    length = sequence.tokens_S.shape[0]
    cuts = (*accumulate([tokens] * ((length - 1) // tokens), initial=0), length)
    return EvaluatedSequence(sequence, cuts, len(own))
