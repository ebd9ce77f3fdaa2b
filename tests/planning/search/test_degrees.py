"""Ways to divide the devices: training refuses none of them."""

from __future__ import annotations

import pytest

from sppo.hardware.file import hardware_for
from sppo.planning.search.choices import degrees_to_try
from sppo.training.checks.input_checks import degree_problems
from tests.planning.cases import run_config

PHI = {
    "vocab_size": 100352,
    "hidden_size": 5120,
    "num_layers": 40,
    "num_heads": 40,
    "num_kv_heads": 10,
    "mlp_size": 17920,
}


def tried(run, **options):
    return degrees_to_try(run, hardware=hardware_for(run.hardware), **options)


@pytest.mark.parametrize("mechanism", ["ulysses", "megatron"])
def test_groups_divide_the_key_value_heads(mechanism):
    run = run_config(PHI, parallel={"sequence_parallel": mechanism})
    possible, refused = tried(run)
    assert {degrees.sequence_parallel for degrees in possible} == {1, 2}
    reasons = {one.reason for one in refused if one.degrees.sequence_parallel == 8}
    assert any("must divide the 10 key/value heads" in reason for reason in reasons)
    for degrees in possible:
        asked = {"sequence_parallel_degree": degrees.sequence_parallel}
        parallel = run.parallel.model_copy(update=asked)
        assert not [*degree_problems(run.model_copy(update={"parallel": parallel}))]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_of_documents_share_no_gradients(zero):
    run = run_config(
        "llama-3.2-1b",
        length="16Ki",
        data={"tokens": "data", "samples": "documents"},
        train={"samples_per_step": 64},
        parallel={"zero": zero},
    )
    possible, _ = tried(run, samples=64)
    assert (max(degrees.data_parallel for degrees in possible) == 1) == (zero > 1)
