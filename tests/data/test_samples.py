"""Steps of samples: every sample once per epoch, rows with several samples, resumed runs."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.data.samples.document_samples import DocumentSamples
from sppo.data.samples.sample_table import check_samples, sample_table
from sppo.data.sequences import IGNORED_LABEL, training_sequence
from tests.data.test_sequences import stream_of
from tests.tiers import examples

documents = st.lists(st.integers(1, 30), min_size=1, max_size=40).filter(lambda x: max(x) > 1)


def samples_of(
    lengths: list[int],
    *,
    length: int = 12,
    longer: str = "cut",
    shuffle: bool = True,
    loss_mask: list[bool] | None = None,
    **step: int,
) -> DocumentSamples:
    """Documents of the given lengths; the token at position p of the stream is p."""
    data = stream_of(lengths, loss_mask=loss_mask)
    table = sample_table(data.document_offsets, length=length, longer=longer)
    return DocumentSamples(table, data, seed=7, shuffle=shuffle, **step)


def walk(training: DocumentSamples, steps: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Samples and position of each of the first ``steps`` steps."""
    taken, positions = [], [0]
    for _ in range(steps):
        taken.append(training.step_samples(positions[-1]))
        positions.append(positions[-1] + len(taken[-1]))
    return taken, positions[:-1]


@settings(max_examples=examples(30, all=100))
@given(documents, st.integers(1, 50), st.booleans())
def test_every_epoch_has_each_sample_once(
    lengths: list[int], samples_per_step: int, shuffle: bool
) -> None:
    training = samples_of(lengths, samples_per_step=samples_per_step, shuffle=shuffle)
    count = training.num_samples
    taken, positions = walk(training, 3 * count // samples_per_step + 1)
    flat = [sample for step in taken for sample in step]
    for epoch in range(3):
        assert sorted(flat[epoch * count : (epoch + 1) * count]) == list(range(count))
        assert training.epoch_of(epoch * count) == epoch
    assert flat == [training.order.sequence_index(p) for p in range(len(flat))]
    assert positions == [step * samples_per_step for step in range(len(taken))]


@settings(deadline=None, max_examples=examples(30, all=100))
@given(documents, st.fractions(0, 2), st.booleans())
def test_tokens_of_a_step_are_as_many_as_fit(
    lengths: list[int], epochs: Fraction, shuffle: bool
) -> None:
    tokens_per_step = math.ceil(epochs * sum(lengths)) or 1
    training = samples_of(lengths, tokens_per_step=tokens_per_step, shuffle=shuffle)
    taken, positions = walk(training, 4)
    for position, step in zip(positions, taken, strict=True):
        tokens = sum(training.lengths(step))
        following = training.order.sequence_index(position + len(step))
        assert tokens <= tokens_per_step or len(step) == 1
        assert tokens + training.lengths([following])[0] > tokens_per_step


@given(documents, st.integers(1, 30), st.data())
def test_a_row_is_its_samples_side_by_side(
    lengths: list[int], length: int, drawn: st.DataObject
) -> None:
    training = samples_of(lengths, length=length, samples_per_step=1)
    chosen = drawn.draw(st.lists(st.integers(0, training.num_samples - 1), min_size=1, max_size=9))
    row = training.row(chosen)
    ends = [*row.document_starts[1:], len(row.tokens_S)]
    assert row.tokens_S.dtype == row.labels_S.dtype == torch.int64
    assert len(row.labels_S) == len(row.tokens_S) == sum(training.lengths(chosen))
    for sample, start, end in zip(chosen, row.document_starts, ends, strict=True):
        first, count = training.table.starts[sample], training.table.lengths[sample]
        assert row.tokens_S[start:end].tolist() == list(range(first, first + count))
        assert row.labels_S[start:end].tolist() == list(range(first + 1, first + count + 1))
    assert row.num_valid == training.num_labels(chosen)


@settings(max_examples=examples(30, all=100))
@given(documents, st.integers(1, 30), st.data())
def test_a_loss_mask_excludes_labels_of_samples(
    lengths: list[int], length: int, drawn: st.DataObject
) -> None:
    count = sum(lengths)
    mask = drawn.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    whole = samples_of(lengths, length=length, samples_per_step=2)
    masked = samples_of(lengths, length=length, samples_per_step=2, loss_mask=mask)
    for position in range(whole.num_samples):
        step = whole.step_samples(position)
        a, b = whole.row(step), masked.row(masked.step_samples(position))
        assert torch.equal(a.tokens_S, b.tokens_S)
        assert a.document_starts == b.document_starts
        assert b.labels_S.tolist() == [x if mask[x] else IGNORED_LABEL for x in a.labels_S]
        assert (whole.num_labels(step), masked.num_labels(step)) == (a.num_valid, b.num_valid)
        assert masked.has_labels(position) is (b.num_valid > 0)


def test_why_no_label_counts() -> None:
    mask = [True] * 4 + [False] * 8
    training = samples_of([4, 8], shuffle=False, samples_per_step=1, loss_mask=mask)
    assert [training.has_labels(position) for position in range(2)] == [True, False]
    assert training.why_no_labels(1) == (
        "no label counts in sample 1 of tokens: the loss mask excludes them"
    )


def test_an_uncut_document_is_what_an_isolated_sequence_has() -> None:
    lengths = [5, 4, 9]
    training = samples_of(lengths, shuffle=False, samples_per_step=3)
    packed = training_sequence(training.data, 0, length=17, isolate_documents=True)
    row = training.row(training.step_samples(0))
    ours = [(t, x) for t, x in zip(row.tokens_S.tolist(), row.labels_S.tolist(), strict=True)]
    theirs = zip(packed.tokens_S.tolist(), packed.labels_S.tolist(), strict=True)
    assert ours == [(t, x) for t, x in theirs if x != IGNORED_LABEL]


def test_a_step_has_no_more_samples_than_are_packed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step late in a corpus that is ordered by length must not end the run."""
    monkeypatch.setattr("sppo.data.samples.step_samples.MOST_SAMPLES", 100)
    training = samples_of([2] * 40, tokens_per_step=1000)
    assert len(training.step_samples(0)) == len(training.step_samples(100)) == 100


def test_a_step_of_one_sample_that_is_longer_than_its_tokens() -> None:
    training = samples_of([11, 3], shuffle=False, tokens_per_step=5)
    assert training.step_samples(0) == (0,)
    assert training.step_samples(1) == (1,)


def test_steps_without_labels_do_not_exist_without_a_loss_mask() -> None:
    training = samples_of([11, 3], samples_per_step=1)
    assert training.has_labels(0)
    assert training.num_labels((0, 1)) == 12


def test_a_damaged_id_is_reported_before_a_kernel_sees_it() -> None:
    training = samples_of([4, 8], samples_per_step=1)
    damaged = replace(training, data=stream_of([4, 8], max_id=7))
    damaged.row([0])
    with pytest.raises(ValueError, match=r"id 11 at token 11, but the largest id .* 7"):
        damaged.row([0, 1])


def test_data_without_samples_is_refused() -> None:
    data = stream_of([1, 1, 9])
    table = sample_table(data.document_offsets, length=4, longer="drop")
    with pytest.raises(ValueError, match="none of its 3 documents is a sample") as caught:
        check_samples(data, table, vocab_size=5)
    assert "model.vocab_size is 5" in str(caught.value), "both problems at once"
    assert "dropped: 1, without a label as they have one token: 2" in str(caught.value)
    assert "raise sequence.length to at least 8, or write sequence.longer=cut" in str(caught.value)
    check_samples(data, sample_table(data.document_offsets, length=4, longer="cut"), vocab_size=11)


def test_data_without_labels_is_refused() -> None:
    data = stream_of([1, 1])
    table = sample_table(data.document_offsets, length=4, longer="cut")
    with pytest.raises(ValueError, match="at most one token, .* prepare other data$"):
        check_samples(data, table, vocab_size=11)


def test_thousands_of_samples_a_step_take_milliseconds() -> None:
    lengths = np.random.default_rng(0).integers(2, 100, 200_000)
    table = sample_table(np.concatenate([[0], np.cumsum(lengths)]), length=64, longer="cut")
    training = DocumentSamples(table, stream_of([2]), seed=0, shuffle=True, tokens_per_step=1 << 19)
    _, positions = walk(training, 21)
    step = training.step_samples(positions[20])
    assert (1 << 19) - 64 < sum(training.lengths(step)) <= 1 << 19
