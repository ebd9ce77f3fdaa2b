"""Ways to divide the devices: training refuses none of them."""

from __future__ import annotations

import pytest

from sppo.config.base import MOST_SUBSEQUENCES
from sppo.hardware.run_hardware import hardware_for
from sppo.planning.search import candidates
from sppo.planning.search.choices import degree_problems, degrees_to_try, subsequence_counts_to_try
from tests.planning.cases import run_config, solved

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
    reasons = {reason for degrees, reason in refused.items() if degrees.sequence_parallel == 8}
    assert any("must divide the 10 key/value heads" in reason for reason in reasons)
    for degrees in possible:
        assert not [*degree_problems(run, degrees=degrees)]


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


@pytest.mark.parametrize("length", ["64Mi", "1Gi"])
def test_no_more_subsequences_are_tried_than_a_run_may_ask_for(length):
    run = run_config("tiny", length=length)
    counts = subsequence_counts_to_try(run, hardware=hardware_for(run.hardware))
    assert counts[-1] == MOST_SUBSEQUENCES


def test_few_subsequences_are_tried_where_many_ranks_share_them():
    """16Ki tokens for each of 8 ranks: one subsequence may be the fastest."""
    run = run_config("llama-3.2-1b", length="128Ki", hardware={"preset": "h200"})
    assert len(solved(run).best.candidate.lengths) == 1


@pytest.mark.parametrize("keys", [{"virtual_stages": 8}, {"pipeline_parallel_degree": 1}])
def test_steps_have_no_more_units_than_can_be_planned(monkeypatch, keys):
    monkeypatch.setattr(candidates, "MOST_UNITS", 64)
    model = {**PHI, "num_layers": 8, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
    machine = {"preset": "a100-80g", "devices_per_node": 1}
    run = run_config(model, length="64Ki", parallel=keys, hardware=machine)
    best = solved(run).best
    assert best.costs.forward_s.size <= 64


def test_a_step_of_too_many_units_is_refused():
    cut = {"num_subsequences": 512}
    train = {"sequences_per_step": 16384}
    machine = {"preset": "a100-80g", "devices_per_node": 1}
    run = run_config("tiny", length="1Mi", sequence=cut, train=train, hardware=machine)
    (rejection,) = solved(run).rejected
    assert "16,384 sequences x 512 subsequences x 1 stage has 8388608 units" in rejection.reason
    assert "lower train.sequences_per_step" in rejection.reason
