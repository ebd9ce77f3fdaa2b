"""Loss by position against the plain model, token by token."""

import math
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo.config import load_run
from sppo.data.sample_rows import TrainingData
from sppo.data.tokens import open_tokens
from sppo.engine.engine import Engine
from sppo.kernels.labels import IGNORED_LABEL
from sppo.planning.validation_plan import SetPlan
from sppo.training.validation.evaluate import EvaluatedSet, evaluate_set
from sppo.training.validation.sums import bins_of
from sppo.training.weights.starting_weights import starting_weights
from tests.conftest import LENGTH, write_tokens
from tests.engine.reference import reference_logits, reference_token_losses
from tests.training.jobs import evaluate_initial, job_alone


def directly(run, *, sequences):
    """(losses, counts) at each position by the plain model."""
    weights = {name: weight.double() for name, weight in starting_weights(run)}
    data = TrainingData.of(run, open_tokens(run.data.tokens))
    losses = torch.zeros(run.sequence.length, dtype=torch.float64)
    counts = torch.zeros(run.sequence.length)
    for index in range(sequences):
        sequence = data.row([index])
        length = len(sequence.tokens_S)
        losses[:length] += reference_token_losses(run.model, weights, sequence)
        counts[:length] += sequence.labels_S != IGNORED_LABEL
    return losses, counts


@pytest.mark.parametrize("isolate", [False, True])
def test_as_the_plain_model_says(work, run_file, isolate):
    starts = (3, 50, LENGTH, LENGTH + 1, 2 * LENGTH - 1, 150)
    write_tokens(work / "documents", num_tokens=3 * LENGTH + 1, documents=starts)
    run = load_run(run_file(data={"tokens": "documents", "isolate_documents": isolate}))
    result = evaluate_initial(run)
    losses, counts = directly(run, sequences=3)
    assert result.num_tokens == int(counts.sum()) == 3 * LENGTH - isolate * len(starts)
    assert result.loss == pytest.approx(float(losses.sum() / counts.sum()), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert (result.num_sequences, result.held_out, result.step) == (3, False, 0)
    (only,) = result.by_position
    assert only.loss == pytest.approx(result.loss)


def test_bins_as_the_plain_model_says(work, run_file):
    run = load_run(run_file(sequence={"length": 300, "num_subsequences": 5}))
    seen = []
    result = evaluate_initial(run, most=2, on_sequence=lambda *pair: seen.append(pair))
    assert seen == [(1, 2), (2, 2)]
    losses, counts = directly(run, sequences=2)
    assert [(row.start, row.end) for row in result.by_position] == [
        (0, 64),
        (64, 128),
        (128, 256),
        (256, 300),
    ]
    for row in result.by_position:
        part = slice(row.start, row.end)
        assert row.num_tokens == 2 * (row.end - row.start)
        expected = float(losses[part].sum() / counts[part].sum())
        assert row.loss == pytest.approx(expected, rel=1e-5)


def test_samples_as_the_plain_model_says(work, run_file):
    """Short ones side by side, long ones cut, each at its own positions."""
    starts = (3, 50, 51, LENGTH, 2 * LENGTH + 9, 4 * LENGTH)
    write_tokens(work / "documents", num_tokens=5 * LENGTH, documents=starts)
    train = {"samples_per_step": 1}
    data = {"tokens": "documents", "samples": "documents"}
    run = load_run(run_file(data=data, train=train, sequence={"num_subsequences": 3}))
    result = evaluate_initial(run)
    samples = TrainingData.of(run, open_tokens(run.data.tokens))
    losses, counts = directly(run, sequences=samples.num_samples)
    assert result.num_sequences == samples.num_samples == 8  # two of more than 64 tokens are cut
    assert result.num_tokens == int(counts.sum())
    assert result.loss == pytest.approx(float(losses.sum() / counts.sum()), rel=1e-5)
    few = evaluate_initial(run, most=2)
    assert few.num_tokens == sum(samples.lengths([0, 1]))


def test_correct_labels_of_each_sample_and_exact_matches(work, run_file):
    starts = (3, 5, 50, 51, LENGTH, 2 * LENGTH + 9)
    write_tokens(work / "documents", num_tokens=3 * LENGTH, documents=starts)
    data = {"tokens": "documents", "samples": "documents"}
    run = load_run(run_file(data=data, train={"samples_per_step": 1}))
    weights = {name: weight.double() for name, weight in starting_weights(run)}
    samples = TrainingData.of(run, open_tokens(run.data.tokens))
    engine = Engine(run.model, weights=weights, gradients=None)
    plan = SetPlan("data", (0, LENGTH // 2, LENGTH), samples.num_samples, 1, 0.0, 0.0, ())
    found = evaluate_set(job_alone(run), engine, EvaluatedSet.of(run, samples, plan))
    correct, exact, total = [], 0, 0.0
    for index in range(samples.num_samples):
        row = samples.row([index])
        best = reference_logits(run.model, weights, row).argmax(1)
        correct.append(int((best == row.labels_S).sum()))
        exact += correct[-1] == len(row.labels_S)
        total += float(reference_token_losses(run.model, weights, row).sum())
    assert found.sample_correct.tolist() == correct
    assert found.sample_labels.tolist() == list(samples.lengths(range(samples.num_samples)))
    assert found.accuracy == sum(correct) / found.num_labels
    assert found.exact == exact / samples.num_samples
    assert found.loss == pytest.approx(total / found.num_labels)


def test_no_label_that_counts(work, run_file):
    starts = tuple(range(1, 2 * LENGTH + 1))
    write_tokens(work / "words", num_tokens=2 * LENGTH + 1, documents=starts)
    run = load_run(run_file(data={"tokens": "words", "isolate_documents": True}))
    with pytest.raises(ValueError, match="no label of its first 2 sequences counts"):
        evaluate_initial(run)


@given(st.integers(1, 3000))
def test_bins_double_and_lose_nothing(length):
    bins = bins_of(length)
    assert [*chain.from_iterable(range(*edges) for edges in bins)] == [*range(length)]
    for start, end in bins:
        assert start in (0, *(64 << k for k in range(8)))
        assert end in (length, *(64 << k for k in range(8)))
