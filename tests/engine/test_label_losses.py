"""Losses and correct predictions of labels by document and by position, against the plain model."""

import numpy as np
import pytest
import torch

from sppo.engine.engine import Engine
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL
from tests.engine.models import Trained, random_sequence, random_weights, tiny_model
from tests.engine.reference import reference_logits, reference_token_losses

MODEL = tiny_model("gqa, q/k-norm")
WEIGHTS = random_weights(MODEL)
EDGES = (2, 4, 8)


def expected_sums(data, groups, count):
    """Losses, labels and correct predictions by group, from the plain model's logits."""
    losses = reference_token_losses(MODEL, WEIGHTS, data)
    correct = reference_logits(MODEL, WEIGHTS, data).argmax(1) == data.labels_S
    valid = data.labels_S != IGNORED_LABEL
    sums = np.zeros((3, count))
    for token in valid.nonzero().flatten().tolist():
        sums[:, groups[token]] += float(losses[token]), 1, bool(correct[token])
    return sums


def assert_sums(data, found):
    starts = data.document_starts
    of_token = np.searchsorted(starts, np.arange(len(data.tokens_S)), side="right") - 1
    inside = np.arange(len(of_token)) - np.array(starts)[of_token]
    for ours, groups, count in (
        (found.by_document(starts), of_token, len(starts)),
        (found.by_position(starts, EDGES), np.digitize(inside, EDGES), len(EDGES) + 1),
    ):
        np.testing.assert_allclose(ours, expected_sums(data, groups, count), rtol=1e-11)


@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.9])
def test_sums_of_training_and_of_forwards(ignored):
    """Two sequences at once; labels copied from predictions make many correct."""
    sequences, cuts = [], [(0, 7, 8, 23), (0, 11)]
    for seed, (length, starts) in enumerate([(23, (0, 9, 10)), (11, (0,))]):
        data = random_sequence(MODEL, length, seed=seed, ignored=ignored, starts=starts)
        best = reference_logits(MODEL, WEIGHTS, data).argmax(1)
        wanted = (data.labels_S != IGNORED_LABEL) & (torch.arange(length) % 3 > 0)
        sequences.append(
            SequenceData(data.tokens_S, torch.where(wanted, best, data.labels_S), starts)
        )
    trained = Trained(MODEL, WEIGHTS)
    step = trained.engine.accumulate(sequences, cuts)
    alone = Engine(MODEL, weights=WEIGHTS, gradients=None).evaluate_together(sequences, cuts)
    for found in (step.losses, alone.losses):
        assert len(found) == 2
        for data, own in zip(sequences, found, strict=True):
            assert_sums(data, own)
    total = sum(float(own.losses_L.sum()) for own in step.losses)
    assert total == pytest.approx(float(step.total_loss), rel=1e-12)


def test_a_unit_without_labels_and_a_sequence_without_any():
    data = random_sequence(MODEL, 20, ignored=0.3)
    masked = data.labels_S.clone()
    masked[8:15] = IGNORED_LABEL
    some = SequenceData(data.tokens_S, masked)
    none = SequenceData(data.tokens_S, torch.full_like(masked, IGNORED_LABEL))
    trained = Trained(MODEL, WEIGHTS)
    both = trained.step([some, none], [(0, 8, 15, 20)] * 2)
    alone = trained.step([some], [(0, 8, 15, 20)])
    assert float(both[0]) == float(alone[0])
    assert all(torch.equal(both[1][name], gradient) for name, gradient in alone[1].items())
    found = trained.engine.evaluate_together([some, none], [(0, 8, 15, 20)] * 2).losses
    assert_sums(some, found[0])
    assert found[1].by_document((0,)).labels_G.tolist() == [0]
