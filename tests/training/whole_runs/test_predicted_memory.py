"""Memory of the ranks of whole runs on a CPU, against the plan's."""

from unittest.mock import patch

import pytest
import torch

from sppo.kernels.native.cpu_allocator import install_cpu_allocator
from sppo.model import experts
from sppo.training.records.outcome import predicted_and_measured
from tests.conftest import write_run, write_tokens
from tests.tiers import each_once, exhaustive
from tests.training.jobs import train_rank
from tests.training.whole_runs import test_parallel_runs as parallel_runs

MODEL = {
    "hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_size": 64,
    "mlp_size": 704,
}  # fmt: skip


def working_bytes(rank, directory, arguments=()):
    """Predicted and measured bytes of one rank's working set and messages, in the rank pool."""
    checked, outcome = train_rank(rank, directory, arguments)
    plan = checked.plan
    device = plan.rank_memory[rank].device
    saved = device.activations_bytes + device.loss_gradient_bytes
    return (
        plan.schedule,
        (device.working_bytes + device.communication_bytes, outcome.buckets.working_bytes),
        (saved, outcome.buckets.activations_bytes),
    )


NORMED = {**MODEL, "norm_placement": "post", "qk_norm": "all", "attention_sinks": True}


@pytest.mark.parametrize(
    ("policy", "multiplexed", "sequences", "model"),
    [
        pytest.param("retain", "on", 1, MODEL, marks=pytest.mark.exhaustive),
        ("keep_attention", "on", 2, MODEL),
        pytest.param("retain", "off", 2, MODEL, marks=pytest.mark.exhaustive),
        pytest.param("recompute", "off", 1, MODEL, marks=pytest.mark.exhaustive),
        ("retain", "off", 2, NORMED),
        pytest.param("keep_attention", "on", 1, NORMED, marks=pytest.mark.exhaustive),
        pytest.param("recompute", "off", 1, NORMED, marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_take_what_is_planned(ranks, tmp_path, policy, multiplexed, sequences, model):
    if install_cpu_allocator() is None:
        pytest.skip("torch's CPU tensors live in the C heap here")
    write_tokens(tmp_path / "tokens", num_tokens=20000)
    write_run(
        tmp_path / "run.yaml",
        model=model,
        sequence={"length": 2048, "num_subsequences": 4},
        parallel={"pipeline_parallel_degree": 2, "multiplexed": multiplexed},
        activations={"policy": policy},
        train={"steps": 2, "dtype": "fp32", "sequences_per_step": sequences, "output": "out"},
    )
    for schedule, (predicted, measured), (saved, activations) in ranks.run(
        working_bytes, tmp_path, ranks=2
    ):
        assert (schedule == "sppo_msp") == (multiplexed == "on")
        assert saved == pytest.approx(activations, rel=1e-4)
        assert predicted == pytest.approx(measured, rel=0.05)


HYBRID = {
    **MODEL, "attention_gate": True, "layer_types": ["full", "linear"],
    "linear_attention": {"key_heads": 2, "value_heads": 4},
}  # fmt: skip


def hybrid_bytes(rank, directory):
    """Predicted and measured bytes of one rank, and the predicted ones without messages."""
    checked, outcome = train_rank(rank, directory)
    memory = checked.plan.rank_memory
    device = memory[rank % len(memory)].device
    found = predicted_and_measured(device, outcome.buckets, all_bytes=outcome.peak_bytes)
    return found, device.working_bytes


def train_hybrid(ranks, tmp_path, policy, **parallel):
    if install_cpu_allocator() is None:
        pytest.skip("torch's CPU tensors live in the C heap here")
    write_tokens(tmp_path / "tokens", num_tokens=20000)
    write_run(
        tmp_path / "run.yaml",
        model=HYBRID,
        sequence={"length": 8192, "num_subsequences": 4},
        parallel={"pipeline_parallel_degree": 1, **parallel},
        activations={"policy": policy},
        train={"steps": 2, "dtype": "fp32", "output": "out"},
    )
    return ranks.run(hybrid_bytes, tmp_path, ranks=2)


@pytest.mark.parametrize(("policy", "stages"), [("retain", 1), ("recompute", 2)])
def test_hybrids_take_what_is_planned(ranks, tmp_path, policy, stages):
    layout = {"pipeline_parallel_degree": 2, "virtual_stages": stages}
    for found, _ in train_hybrid(ranks, tmp_path, policy, **layout):
        for name in ("working set", "activations", "K/V and gradients"):
            predicted, measured = found[name]
            assert predicted == pytest.approx(measured, rel=0.05), name


def test_ranks_that_share_the_heads_of_states_take_what_is_planned(ranks, tmp_path):
    """Buffers of the sum of gradients, which are messages, are there when no layer runs."""
    for found, working_bytes in train_hybrid(
        ranks, tmp_path, "keep_attention", sequence_parallel_degree=2
    ):
        for name in ("activations", "K/V and gradients"):
            predicted, measured = found[name]
            assert predicted == pytest.approx(measured, rel=1e-3), name
        assert found["working set"][1] == pytest.approx(working_bytes, rel=0.05)


EXPERTS = {
    "count": 8, "per_token": 3, "mlp_size": 256, "shared_mlp_size": 128,
}  # fmt: skip


def working_bytes_on_few_experts(rank, directory):
    """:func:`working_bytes` of a run in which all tokens choose the same experts."""

    def first(logits_CX, experts, choice_bias_X):
        return torch.arange(experts.per_token, dtype=torch.int16).repeat(len(logits_CX), 1)

    with patch.object(experts, "choose", first):
        return working_bytes(rank, directory, ["train.output=few"])


@pytest.mark.parametrize(
    ("policy", "multiplexed", "tokens"),
    [
        ("keep_attention", "on", 512),
        ("retain", "off", 1024),
        pytest.param("retain", "off", 512, marks=pytest.mark.exhaustive),
        pytest.param("recompute", "off", 512, marks=pytest.mark.exhaustive),
        pytest.param("recompute", "off", 1024, marks=pytest.mark.exhaustive),
    ],
)
def test_experts_take_what_is_planned_whatever_tokens_choose(
    ranks, tmp_path, policy, multiplexed, tokens
):
    """683 tokens pass through the experts at once."""
    if install_cpu_allocator() is None:
        pytest.skip("torch's CPU tensors live in the C heap here")
    write_tokens(tmp_path / "tokens", num_tokens=20000)
    write_run(
        tmp_path / "run.yaml",
        model={**MODEL, "experts": EXPERTS},
        sequence={"length": 2048, "num_subsequences": 2048 // tokens},
        parallel={"pipeline_parallel_degree": 2, "multiplexed": multiplexed},
        activations={"policy": policy},
        train={"steps": 2, "dtype": "fp32", "sequences_per_step": 1, "output": "out"},
    )
    random, same = (
        ranks.run(way, tmp_path, ranks=2) for way in (working_bytes, working_bytes_on_few_experts)
    )
    for (_, (predicted, measured), (saved, activations)), (_, few, saved_of_few) in zip(
        random, same, strict=True
    ):
        assert saved == pytest.approx(activations, rel=1e-4)
        assert saved_of_few == (saved, activations)
        assert predicted == pytest.approx(measured, rel=0.05)
        assert few == pytest.approx((predicted, measured), rel=0.01)


@pytest.mark.parametrize(
    ("adapter", "policy", "multiplexed"),
    [
        ({"rank": 64, "layers": "1-3"}, "keep_attention", "off"),
        pytest.param({"rank": 16}, "retain", "on", marks=pytest.mark.exhaustive),
        pytest.param(
            {"rank": 16, "layers": "2-3"}, "recompute", "on", marks=pytest.mark.exhaustive
        ),
        pytest.param({"rank": 16, "layers": "3"}, "retain", "off", marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_with_adapters_take_what_is_planned(
    ranks, tmp_path, adapter, policy, multiplexed
):
    if install_cpu_allocator() is None:
        pytest.skip("torch's CPU tensors live in the C heap here")
    write_tokens(tmp_path / "tokens", num_tokens=20000)
    write_run(
        tmp_path / "run.yaml",
        model=MODEL,
        adapter=adapter,
        sequence={"length": 2048, "num_subsequences": 4},
        parallel={"pipeline_parallel_degree": 2, "multiplexed": multiplexed},
        activations={"policy": policy},
        train={"steps": 2, "dtype": "fp32", "sequences_per_step": 2, "output": "out"},
    )
    for _, (predicted, measured), (saved, activations) in ranks.run(
        working_bytes, tmp_path, ranks=2
    ):
        assert saved == pytest.approx(activations, rel=1e-4)
        assert predicted == pytest.approx(measured, rel=0.05)


def kv_bytes(rank, directory):
    """Predicted and measured bytes of K, V and their gradients on one rank."""
    checked, outcome = train_rank(rank, directory)
    device = checked.plan.rank_memory[rank].device
    found = predicted_and_measured(device, outcome.buckets, all_bytes=outcome.peak_bytes)
    return found["K/V and gradients"]


@pytest.mark.parametrize("kv", ["recompute", *exhaustive("retain")])
def test_keys_of_windows_take_what_is_planned(ranks, tmp_path, kv):
    """Two of three layers have a window."""
    write_tokens(tmp_path / "tokens", num_tokens=4000)
    windows = {"sliding_window": 30, "layer_types": ["sliding", "full", "sliding"]}
    write_run(
        tmp_path / "run.yaml",
        model={**MODEL, **windows, "num_layers": 6},
        train={"steps": 1, "output": "out"},
        sequence={"length": 512, "num_subsequences": 5},
        parallel={"pipeline_parallel_degree": 2, "virtual_stages": 1, "multiplexed": "off"},
        activations={"policy": "keep_attention", "kv": kv},
    )
    for predicted, measured in ranks.run(kv_bytes, tmp_path, ranks=2):
        assert predicted == measured


def state_bytes(rank, directory, arguments):
    """(predicted, measured) bytes of weights and of gradients on one of two replicas."""
    checked, outcome = train_rank(rank, directory, arguments)
    device = checked.plan.stages[0].memory.device
    found = predicted_and_measured(device, outcome.buckets, all_bytes=outcome.peak_bytes)
    return found["weights"], found["gradients"]


@pytest.mark.parametrize(("zero", "vocab_size"), each_once([1, 2, 3], [64, 4096]))
def test_replicas_hold_the_shards_that_are_planned(ranks, work, run_file, zero, vocab_size):
    run_file(
        model={**parallel_runs.MODEL, "vocab_size": vocab_size},
        train={"steps": 1, "sequences_per_step": 2},
    )
    arguments = parallel_runs.overrides(
        (2, 1, 1), 1, **{"parallel.zero": zero, "train.output": "two"}
    )
    for answer in ranks.run(state_bytes, work, arguments, ranks=2):
        for predicted, measured in answer:
            assert measured == pytest.approx(predicted, rel=0.01)
