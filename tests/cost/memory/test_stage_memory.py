"""Memory buckets against the tensors of a real run; tests/engine/test_steps.py tests the peaks."""

from dataclasses import fields

import pytest
import torch

from sppo.activations.policy import POLICIES
from sppo.config.optimizer import OptimizerConfig
from sppo.model.gradients import zero_gradients
from sppo.optim.adamw import AdamW
from tests.engine.models import VARIANTS, random_weights, tiny_model
from tests.planning.one_device import predicted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def total(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_state_has_the_bytes_predicted(variant, dtype):
    model = tiny_model(variant)
    weights = random_weights(model, dtype=DTYPES[dtype])
    buckets = predicted(model, dtype=dtype)
    assert total(weights.values()) == buckets.weights_bytes
    assert total(zero_gradients(weights).values()) == buckets.gradients_bytes
    state = AdamW(weights, config=OptimizerConfig()).state()
    own = {weight.data_ptr() for weight in weights.values()}
    others = [t for name, t in state.items() if t.data_ptr() not in own and "step" not in name]
    assert total(others) == buckets.optimizer_bytes


def test_the_total_is_the_sum_of_all_buckets():
    buckets = predicted(tiny_model())
    values = [getattr(buckets, field.name) for field in fields(buckets)]
    assert all(value >= 0 for value in values)
    assert buckets.total_bytes == sum(values)
    assert getattr(buckets, buckets.largest) == max(values)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_linear_in_the_sequence(policy):
    model = tiny_model("gqa, q/k-norm")
    # A part of the prefix has at most 8192 keys, so longer prefixes need no larger working set.
    one, two, three = (predicted(model, policy=policy, lengths=(500,) * 20 * n) for n in (1, 2, 3))
    assert three.total_bytes - two.total_bytes == two.total_bytes - one.total_bytes > 0
    assert (one.weights_bytes, one.working_bytes) == (three.weights_bytes, three.working_bytes)
