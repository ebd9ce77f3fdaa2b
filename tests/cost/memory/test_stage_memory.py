"""Memory buckets against the tensors of a real run; tests/engine/test_steps.py tests the peaks."""

from dataclasses import fields, replace
from math import prod

import pytest
import torch

from sppo.activations.policy import POLICIES
from sppo.config.run import OptimizerConfig
from sppo.cost.candidate import Candidate, layers_of_stages
from sppo.cost.layer import Workload
from sppo.cost.parameters import stage_shapes
from sppo.engine.providers.part_rows import PartRows
from sppo.hardware.presets import PRESETS
from sppo.model.gradients import zero_gradients
from sppo.optim.adamw import AdamW
from sppo.planning.search.evaluation import evaluate_candidate
from tests.engine.models import VARIANTS, random_weights, tiny_model
from tests.engine.providers.rows import layouts_of
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


class TwoRanks:
    """A group that nobody talks in."""

    def size(self):
        return 2


@pytest.mark.parametrize(("variant", "vocab_size"), [("mha", 8), ("mha", 4000), ("gpt", 4000)])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_which_a_device_keeps_its_shards(variant, vocab_size, num_stages, dtype):
    model = tiny_model(variant, vocab_size=vocab_size, num_layers=4)
    workload = Workload(model, PRESETS["laptop-cpu"], dtype=dtype)
    candidate = Candidate(
        workload,
        (30, 30, 40),
        pipeline_parallel_degree=num_stages,
        data_parallel_degree=2,
        zero=3,
        policy="retain",
    )
    stages = layers_of_stages(model.num_layers, num_stages=num_stages)
    for layers, memory in zip(stages, evaluate_candidate(candidate).memory, strict=True):
        shapes = stage_shapes(model, layers)
        layouts = layouts_of(shapes, ranks=2)
        shards = {
            key: torch.empty(layout.shard_elements, dtype=DTYPES[dtype])
            for key, layout in layouts.items()
        }
        groups = dict.fromkeys(layouts, TwoRanks())
        gathered = PartRows(shards, layouts, groups)
        assert memory.device.weights_bytes == total(shards.values()) + gathered.room_bytes
        sums = zero_gradients(shards)
        formed = PartRows(sums, layouts, groups)
        assert memory.device.gradients_bytes == total(sums.values()) + formed.room_bytes
    kept = evaluate_candidate(replace(candidate, zero=2)).memory
    assert [m.device.gradients_bytes for m in kept] == [
        m.device.gradients_bytes for m in evaluate_candidate(candidate).memory
    ]
    for layers, memory in zip(stages, kept, strict=True):
        elements = sum(map(prod, stage_shapes(model, layers).values()))
        assert memory.device.weights_bytes == elements * DTYPES[dtype].itemsize


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


def test_only_the_working_set_grows_with_a_subsequence():
    model = tiny_model()
    short, long = (predicted(model, lengths=lengths) for lengths in ((500,) * 4, (1000,) * 2))
    assert long.working_bytes > short.working_bytes
    # and the program of a step shrinks with their number
    difference = sum(
        getattr(long, name) - getattr(short, name) for name in ("working_bytes", "growth_bytes")
    )
    assert long.total_bytes - short.total_bytes == difference
