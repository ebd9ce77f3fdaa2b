"""Sequences cut from the stream: positions, labels, document isolation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo.data.sequences import (
    IGNORED_LABEL,
    SequenceData,
    TrainingData,
    count_labels,
    count_sequences,
    training_sequence,
)
from sppo.data.tokens import TokenData, TokenizerDescription, TokenMeta


def stream_of(
    lengths: list[int], *, max_id: int | None = None, loss_mask: list[bool] | None = None
) -> TokenData:
    """Documents of the given lengths; the token at position p of the stream is p."""
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    meta = TokenMeta(
        format_version=1,
        dtype="uint32",
        vocab_size=len(tokens),
        max_id=len(tokens) - 1 if max_id is None else max_id,
        num_tokens=len(tokens),
        num_documents=len(lengths),
        tokens_sha256="",
        tokenizer=TokenizerDescription(name="ids", end_of_document=None),
    )
    offsets = np.cumsum([0, *lengths])
    return TokenData(
        directory=Path("tokens"),
        meta=meta,
        tokens=tokens,
        document_offsets=offsets,
        loss_mask=None if loss_mask is None else np.array(loss_mask, dtype=np.uint8),
    )


documents = st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda x: sum(x) > 1)


def _examples(sequence: SequenceData) -> list[tuple[tuple[int, ...], int]]:
    """What the loss is taken over: each label with all that attention may see before it."""
    tokens, labels = sequence.tokens_S.tolist(), sequence.labels_S.tolist()
    examples = []
    for position, label in enumerate(labels):
        start = max(s for s in sequence.document_starts if s <= position)
        if label != IGNORED_LABEL:
            examples.append((tuple(tokens[start : position + 1]), label))
    return examples


@given(lengths=documents, data=st.data())
def test_isolated_sequence_equals_its_documents_trained_apart(
    lengths: list[int], data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, sum(lengths) - 1))
    stream = stream_of(lengths)
    for index in range(count_sequences(stream, length=length)):
        packed = training_sequence(stream, index, length=length, isolate_documents=True)
        window = set(range(index * length, index * length + length + 1))
        apart = []
        for start, end in zip(
            stream.document_offsets[:-1], stream.document_offsets[1:], strict=True
        ):
            piece = sorted(window & set(range(start, end)))
            apart += [(tuple(piece[:n]), piece[n]) for n in range(1, len(piece))]
        assert _examples(packed) == apart
        assert packed.num_valid == len(apart)
        assert packed.document_starts[0] == 0
        assert list(packed.document_starts) == sorted(set(packed.document_starts))
        assert packed.document_starts[-1] < length


@given(lengths=documents, data=st.data())
def test_joined_sequences_are_the_stream(lengths: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(1, sum(lengths) - 1))
    stream = stream_of(lengths)
    num_sequences = count_sequences(stream, length=length)
    assert num_sequences * length + 1 <= stream.num_tokens < (num_sequences + 1) * length + 1
    for index in range(num_sequences):
        sequence = training_sequence(stream, index, length=length, isolate_documents=False)
        first = index * length
        assert sequence.tokens_S.tolist() == list(range(first, first + length))
        assert sequence.labels_S.tolist() == list(range(first + 1, first + length + 1))
        assert sequence.document_starts == (0,)
        assert sequence.num_valid == length


@given(lengths=documents, isolate=st.booleans(), data=st.data())
def test_a_loss_mask_excludes_labels_and_nothing_else(
    lengths: list[int], isolate: bool, data: st.DataObject
) -> None:
    count = sum(lengths)
    mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    length = data.draw(st.integers(1, count - 1))
    whole, masked = stream_of(lengths), stream_of(lengths, loss_mask=mask)
    for index in range(count_sequences(whole, length=length)):
        a, b = (
            training_sequence(stream, index, length=length, isolate_documents=isolate)
            for stream in (whole, masked)
        )
        assert torch.equal(a.tokens_S, b.tokens_S)
        assert a.document_starts == b.document_starts
        expected = [x if x != IGNORED_LABEL and mask[x] else IGNORED_LABEL for x in a.labels_S]
        assert b.labels_S.tolist() == expected
        for stream, sequence in ((whole, a), (masked, b)):
            counted = count_labels(stream, index, length=length, isolate_documents=isolate)
            assert counted == sequence.num_valid


def test_why_no_label_counts() -> None:
    masked = _training(stream_of([21], loss_mask=[False] * 9 + [True] * 12))
    first = replace(masked, sequences_per_step=2)
    assert not first.has_labels(0)
    assert first.why_no_labels(0) == (
        "no label counts in sequence 0, 1 of tokens: the loss mask excludes them"
    )
    isolated = replace(first, isolate_documents=True)
    assert isolated.why_no_labels(0).endswith(
        "excludes them, and with data.isolate_documents "
        "the first token of a document is nobody's label"
    )
    ones = replace(isolated, data=stream_of([1] * 21))
    assert "all documents there have one token, and with" in ones.why_no_labels(0)


def test_shapes_types_and_boundary_positions() -> None:
    #            0 1 2 | 3 4 | 5 6 7 | 8 ...: the second sequence of 4 is tokens 4..8
    stream = stream_of([3, 2, 3, 9])
    sequence = training_sequence(stream, 1, length=4, isolate_documents=True)
    assert sequence.tokens_S.dtype == sequence.labels_S.dtype == torch.int64
    assert sequence.tokens_S.tolist() == [4, 5, 6, 7]
    assert sequence.labels_S.tolist() == [IGNORED_LABEL, 6, 7, IGNORED_LABEL]
    assert sequence.document_starts == (0, 1)
    assert sequence.num_valid == 2
    assert sequence.labels_S.is_contiguous()


def _training(stream: TokenData, *, shuffle: bool = False) -> TrainingData:
    return TrainingData(
        stream,
        length=4,
        sequences_per_step=3,
        seed=0,
        shuffle=shuffle,
        isolate_documents=False,
    )


def test_steps_follow_the_stream_and_wrap_into_the_next_epoch() -> None:
    training = _training(stream_of([21]))  # (21 - 1) // 4 = 5 sequences
    assert training.num_sequences == 5
    assert training.sequence_indices(0) == (0, 1, 2)
    assert training.sequence_indices(1) == (3, 4, 0)
    assert [training.epoch_of(step) for step in range(4)] == [0, 0, 1, 1]
    assert [s.tokens_S[0].item() for s in training.step(1)] == [12, 16, 0]


def test_a_resumed_run_reads_what_the_first_would_have() -> None:
    stream = stream_of([101])
    first, resumed = _training(stream, shuffle=True), _training(stream, shuffle=True)
    for step in range(5):
        first.step(step)
    for step in (5, 17):
        for a, b in zip(first.step(step), resumed.step(step), strict=True):
            assert torch.equal(a.tokens_S, b.tokens_S)
            assert torch.equal(a.labels_S, b.labels_S)


def test_a_damaged_id_is_reported_before_a_kernel_sees_it() -> None:
    with pytest.raises(ValueError, match=r"tokens.bin: id 20 at token 20, but the largest id .* 7"):
        training_sequence(stream_of([21], max_id=7), 4, length=4, isolate_documents=False)
