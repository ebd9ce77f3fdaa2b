"""Gradients of the engine on one rank: what policies, calls and steps without labels do to them."""

import pytest
import torch

from sppo.activations.policy import POLICIES
from sppo.engine.unit import SequenceData
from sppo.kernels.labels import IGNORED_LABEL
from tests.engine.models import (
    VARIANTS,
    Trained,
    assert_equal_bits,
    engine_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.tiers import each_once


@pytest.mark.parametrize(
    ("variant", "dtype"), each_once(VARIANTS, [torch.float64, torch.float32, torch.bfloat16])
)
def test_policies_agree_bit_for_bit(variant, dtype):
    """What is recomputed comes from the same rows by the same operations."""
    model = tiny_model(variant)
    weights = random_weights(model, dtype=dtype)
    sequences = [random_sequence(model, 37), random_sequence(model, 20, seed=1, starts=(0, 8))]
    cuts = [(0, 1, 9, 30, 37), (0, 13, 20)]
    retained = engine_step(model, weights, sequences, cuts, policy="retain")
    for policy in POLICIES[1:]:
        other = engine_step(model, weights, sequences, cuts, policy=policy)
        assert_equal_bits(other, retained)


def test_gradients_add_up_over_calls():
    model = tiny_model("gqa, q/k-norm")
    trained = Trained(model, random_weights(model))
    data, cuts = [random_sequence(model, 20)], [(0, 7, 20)]
    _, once = trained.step(data, cuts)
    trained.engine.accumulate(data, cuts)
    for name, gradient in trained.gradients.items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-12, atol=1e-15)


def without_labels(length: int) -> SequenceData:
    return SequenceData(
        torch.zeros(length, dtype=torch.int64), torch.full((length,), IGNORED_LABEL)
    )


def test_a_step_without_labels_adds_nothing():
    model = tiny_model()
    loss, gradients = engine_step(model, random_weights(model), [without_labels(4)], [(0, 2, 4)])
    assert loss.isnan()  # the mean of nothing
    assert not any(gradient.any() for gradient in gradients.values())
