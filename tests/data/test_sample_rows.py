"""Steps of samples and their rows: positions, labels, document isolation, resumed runs."""

import math
from dataclasses import replace
from itertools import accumulate, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.kernels.labels import IGNORED_LABEL
from tests.data.streams import documents_of, sequences_of, stream_of
from tests.tiers import examples

documents = st.lists(st.integers(1, 30), min_size=1, max_size=40).filter(lambda x: max(x) > 1)
few_documents = st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda x: sum(x) > 1)


def walk(training, steps):
    """Samples and position of each of the first ``steps`` steps."""
    taken = list(islice(training.steps(), steps))
    return taken, list(accumulate(map(len, taken[:-1]), initial=0))


# Steps


@settings(max_examples=examples(30, all=100))
@given(documents, st.integers(1, 50), st.booleans(), st.booleans())
def test_every_epoch_has_each_sample_once(lengths, samples_per_step, shuffle, in_stream):
    training = documents_of(lengths, samples_per_step=samples_per_step, shuffle=shuffle)
    if in_stream:
        training = sequences_of(
            training.sources[0], 1, samples_per_step=samples_per_step, shuffle=shuffle
        )
    count = training.num_samples
    taken, positions = walk(training, 3 * count // samples_per_step + 1)
    flat = [sample for step in taken for sample in step]
    for epoch in range(3):
        assert sorted(flat[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert flat == training.order.sequence_indices(0, len(flat)).tolist()
    assert positions == [step * samples_per_step for step in range(len(taken))]


@settings(deadline=None, max_examples=examples(30, all=100))
@given(documents, st.fractions(0, 2), st.booleans())
def test_tokens_of_a_step_are_as_many_as_fit(lengths, epochs, shuffle):
    tokens_per_step = math.ceil(epochs * sum(lengths)) or 1
    training = documents_of(lengths, tokens_per_step=tokens_per_step, shuffle=shuffle)
    taken, positions = walk(training, 4)
    for position, step in zip(positions, taken, strict=True):
        tokens = sum(training.lengths(step))
        (following,) = training.order.sequence_indices(position + len(step), 1).tolist()
        assert tokens <= tokens_per_step or len(step) == 1
        assert tokens + training.lengths([following])[0] > tokens_per_step


def test_a_step_has_no_more_samples_than_are_packed_together(monkeypatch):
    """A step late in a corpus that is ordered by length must not end the run."""
    monkeypatch.setattr("sppo.data.samples.sample_table.MOST_SAMPLES", 100)
    training = documents_of([2] * 40, tokens_per_step=1000)
    assert len(training.step_samples(0)) == len(training.step_samples(100)) == 100


@settings(deadline=None, max_examples=examples(30, all=100))
@given(documents, st.integers(1, 90), st.integers(1, 12), st.booleans())
def test_steps_and_samples_of_a_run_are_counted_exactly(lengths, size, steps, by_tokens):
    kind = "tokens_per_step" if by_tokens else "samples_per_step"
    training = documents_of(lengths, **{kind: size})
    taken, _ = walk(training, steps)
    consumed = sum(map(len, taken))
    assert training.num_consumed(steps) == consumed
    assert training.num_steps(consumed) == steps
    assert training.num_steps(consumed + 1) == steps + 1
    assert training.num_steps(consumed - len(taken[-1]) + 1) == steps


def test_many_steps_are_counted_as_they_are_taken(monkeypatch):
    monkeypatch.setattr("sppo.data.samples.sample_table.MOST_SAMPLES", 5)
    training = documents_of([2, 9, 3, 4] * 9, length=7, tokens_per_step=17)
    taken, positions = walk(training, 40)
    assert [training.num_consumed(steps) for steps in range(1, 40)] == positions[1:]
    assert max(map(len, taken)) == 5


# Rows


@settings(max_examples=examples(30, all=100))
@given(documents, st.integers(1, 30), st.data())
def test_a_row_is_its_samples_side_by_side(lengths, length, drawn):
    training = documents_of(lengths, length=length, samples_per_step=1)
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


def _examples(sequence):
    """What the loss is taken over: each label with all that attention may see before it."""
    tokens, labels = sequence.tokens_S.tolist(), sequence.labels_S.tolist()
    examples = []
    for position, label in enumerate(labels):
        start = max(s for s in sequence.document_starts if s <= position)
        if label != IGNORED_LABEL:
            examples.append((tuple(tokens[start : position + 1]), label))
    return examples


@settings(max_examples=examples(30, all=100))
@given(few_documents, st.data())
def test_isolated_sequence_equals_its_documents_trained_apart(lengths, data):
    length = data.draw(st.integers(1, sum(lengths) - 1))
    stream = stream_of(lengths)
    training = sequences_of(stream, length, isolate_documents=True)
    bounds = zip(stream.document_offsets[:-1], stream.document_offsets[1:], strict=True)
    pieces = [set(range(start, end)) for start, end in bounds]
    for index in range(training.num_samples):
        packed = training.row([index])
        window = set(range(index * length, index * length + length + 1))
        apart = []
        for piece in (sorted(window & tokens) for tokens in pieces):
            apart += [(tuple(piece[:n]), piece[n]) for n in range(1, len(piece))]
        assert _examples(packed) == apart
        assert packed.num_valid == len(apart)
        assert packed.document_starts[0] == 0
        assert list(packed.document_starts) == sorted(set(packed.document_starts))
        assert packed.document_starts[-1] < length


@settings(max_examples=examples(30, all=100))
@given(few_documents, st.data())
def test_joined_sequences_are_the_stream(lengths, data):
    length = data.draw(st.integers(1, sum(lengths) - 1))
    training = sequences_of(stream_of(lengths), length)
    count = training.num_samples
    assert count * length + 1 <= sum(lengths) < (count + 1) * length + 1
    for index in range(count):
        sequence = training.row([index])
        first = index * length
        assert sequence.tokens_S.tolist() == list(range(first, first + length))
        assert sequence.labels_S.tolist() == list(range(first + 1, first + length + 1))
        assert sequence.document_starts == (0,)
        assert sequence.num_valid == length


@settings(max_examples=examples(30, all=100))
@given(few_documents, st.sampled_from(["documents", "joined", "isolated"]), st.data())
def test_a_loss_mask_excludes_labels_and_nothing_else(lengths, kind, drawn):
    count = sum(lengths)
    mask = drawn.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    length = drawn.draw(st.integers(1, count - 1))
    if kind == "documents":
        if max(lengths) == 1:
            return
        whole = documents_of(lengths, length=length, samples_per_step=2)
    else:
        isolate = kind == "isolated"
        whole = sequences_of(stream_of(lengths), length, isolate_documents=isolate)
    masked = replace(whole, sources=(stream_of(lengths, loss_mask=mask),))
    for position in range(whole.num_samples):
        step = whole.step_samples(position)
        a, b = whole.row(step), masked.row(step)
        assert torch.equal(a.tokens_S, b.tokens_S)
        assert a.document_starts == b.document_starts
        expected = [x if x != IGNORED_LABEL and mask[x] else IGNORED_LABEL for x in a.labels_S]
        assert b.labels_S.tolist() == expected
        assert (whole.num_labels(step), masked.num_labels(step)) == (a.num_valid, b.num_valid)
        assert masked.has_labels(position) is (b.num_valid > 0)


# Labels and damage


def test_why_no_label_counts():
    mask = [True] * 4 + [False] * 8
    training = documents_of([4, 8], shuffle=False, samples_per_step=1, loss_mask=mask)
    assert [training.has_labels(position) for position in range(2)] == [True, False]
    assert training.why_no_labels(1) == (
        "no label counts in sample 1 of tokens: the loss mask excludes them"
    )
    masked = stream_of([21], loss_mask=[False] * 9 + [True] * 12)
    joined = sequences_of(masked, 4, samples_per_step=2)
    assert not joined.has_labels(0)
    assert joined.why_no_labels(0) == (
        "no label counts in sequence 0, 1 of tokens: the loss mask excludes them"
    )
    isolated = replace(joined, isolate_documents=True)
    assert isolated.why_no_labels(0).endswith(
        "excludes them, and with data.isolate_documents "
        "the first token of a document is nobody's label"
    )
    ones = replace(isolated, sources=(stream_of([1] * 21),))
    assert "all documents there have one token, and with" in ones.why_no_labels(0)


def test_a_damaged_id_is_reported_before_a_kernel_sees_it():
    training = documents_of([4, 8], samples_per_step=1)
    damaged = replace(training, sources=(stream_of([4, 8], max_id=7),))
    damaged.row([0])
    with pytest.raises(ValueError, match=r"tokens.bin: id 11 at token 11, but the largest id .* 7"):
        damaged.row([0, 1])
