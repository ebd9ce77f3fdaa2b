"""Sequences that an evaluation runs forward: of the token stream, or of packed samples."""

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
        sequence: Its tokens.
        boundaries: Its cuts.
        count: Sequences of the stream, or samples, that it is.
    """

    sequence: SequenceData
    boundaries: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class EvaluatedSequences:
    """All sequences of an evaluation.

    Attributes:
        count: Sequences of the stream, or samples.
        parts: They, in order.
    """

    count: int
    parts: Iterator[EvaluatedSequence]


def evaluated_sequences(
    run: RunConfig, data: TokenData, *, boundaries: tuple[int, ...], most: int | None
) -> EvaluatedSequences:
    """Return what an evaluation runs, read when it is asked for.

    Args:
        run: checked.
        data: that is evaluated.
        boundaries: cuts of a sequence as long as the run allows.
        most: sequences or samples, the first of all; None for all.
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
    """Yield short samples side by side, in their order, and long ones cut, each by itself."""
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
