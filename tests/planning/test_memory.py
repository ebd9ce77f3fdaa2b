"""Buckets against the tensors a run really builds; tests/engine/test_steps.py has the peaks."""

from dataclasses import fields

import pytest
import torch

from sppo.config.run import OptimizerConfig
from sppo.model.gradients import zero_gradients
from sppo.planning.activation_policy import POLICIES
from sppo.planning.memory import memory_of_rank
from sppo.train.optimizer import AdamW
from tests.engine.models import VARIANTS, random_weights, tiny_model


def predict(model, *, element_bytes, policy="retain", length=100, longest=30, tile_bytes=1000):
    return memory_of_rank(
        model,
        length=length,
        longest=longest,
        policy=policy,
        element_bytes=element_bytes,
        tile_bytes=tile_bytes,
    )


def total(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_state_has_the_bytes_predicted(variant, dtype):
    model = tiny_model(variant)
    weights = random_weights(model, dtype=dtype)
    predicted = predict(model, element_bytes=dtype.itemsize)
    assert total(weights.values()) == predicted.weights_bytes
    assert total(zero_gradients(weights).values()) == predicted.gradients_bytes
    state = AdamW(weights, config=OptimizerConfig()).state()
    own = {weight.data_ptr() for weight in weights.values()}
    others = [t for name, t in state.items() if t.data_ptr() not in own and "step" not in name]
    assert total(others) == predicted.optimizer_bytes


def test_the_total_is_the_sum_of_all_buckets():
    predicted = predict(tiny_model(), element_bytes=2)
    values = [getattr(predicted, field.name) for field in fields(predicted)]
    assert len(values) == 7
    assert all(value > 0 for value in values)
    assert predicted.total_bytes == sum(values)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_linear_in_the_sequence(policy):
    model = tiny_model("gqa, q/k-norm")
    one, two, three = (
        predict(model, element_bytes=2, policy=policy, length=n * 1000) for n in (1, 2, 3)
    )
    assert three.total_bytes - two.total_bytes == two.total_bytes - one.total_bytes > 0
    assert (one.weights_bytes, one.working_bytes) == (three.weights_bytes, three.working_bytes)


def test_only_the_working_set_grows_with_a_subsequence():
    model = tiny_model()
    short, long = (predict(model, element_bytes=2, longest=n) for n in (10, 100))
    assert long.working_bytes > short.working_bytes
    difference = long.working_bytes - short.working_bytes
    assert long.total_bytes - short.total_bytes == difference
