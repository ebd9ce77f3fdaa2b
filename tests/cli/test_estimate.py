"""``sppo estimate``: figures of the paper, buckets by stage, and refused requests."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from sppo.config.yaml_file import format_yaml
from tests.cli.answers import answer, one_line
from tests.conftest import refuse, succeed, write_run, write_tokens

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "configs/run/gpt_7b_512k_32gpu.yaml"
AS_IN_THE_PAPER = (
    "parallel.virtual_stages=1",
    "parallel.sequence_parallel_degree=8",
    "parallel.pipeline_parallel_degree=4",
    "parallel.data_parallel_degree=1",
)
DEGREES = tuple(f"{axis}_parallel_degree" for axis in ("data", "pipeline", "sequence"))
ALONE = tuple(f"parallel.{degree}=1" for degree in DEGREES)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {
        "model": {"preset": "llama-3.2-1b"},
        "data": {"tokens": "there/is/no/such/directory"},
        "sequence": {"length": "64Ki"},
        "parallel": {"multiplexed": "off", "virtual_stages": 1},
        "hardware": {"preset": "h100", "nodes": 1},
    }
    Path("run.yaml").write_text(format_yaml(values))
    return "run.yaml"


report = partial(answer, "estimate")


def test_every_stage_by_bucket():
    found = report(EXAMPLE, *AS_IN_THE_PAPER)
    assert found["fits"] is True
    assert found["shortfall"] is None
    assert len(found["stages"]) == 4
    for stage in found["stages"]:
        assert sum(stage["device"].values()) == stage["device_bytes"]
    assert found["device_peak_bytes"] == max(stage["device_bytes"] for stage in found["stages"])
    text = one_line(succeed("estimate", EXAMPLE, *AS_IN_THE_PAPER))
    assert "as it stands: SP 8 · PP 4 · DP 1" in text
    assert "model states 111.5 GiB 18 B a parameter" in text
    assert "activations, retain" in text
    assert "rank 0 ranks 1-2 rank 3" in text
    offloading = one_line(succeed("estimate", EXAMPLE, *AS_IN_THE_PAPER, "activations.policy=sppo"))
    assert " fits host memory: " in offloading


def test_layers_with_linear_attention_hold_states_and_no_keys(run):
    words = (run, "model.preset=qwen3.5-4b", *ALONE)
    plain = ("model.linear_attention=null", "model.layer_types=null")
    hybrid, full = (report(*words, *more)["model"] for more in ((), plain))
    assert hybrid["kv_bytes"] * 4 == full["kv_bytes"]
    # 32 heads of 128 x 128 in fp32, and three rows of 8192 channels in bf16, in 24 layers.
    assert hybrid["linear_state_bytes"] == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert full["linear_state_bytes"] == 0
    text = one_line(succeed("estimate", *words))
    assert "K and V, 4 heads for 16 (1/4), in 8 of 32 layers" in text
    assert "24 of 32 layers keep a state of 2.0 MiB a subsequence in place of K and V" in text
    assert "place of K and V" not in one_line(succeed("estimate", *words, *plain))


def test_degrees_left_out_are_those_that_solve_recommends(run):
    found = report(run, "train.sequences_per_step=4")
    solved = answer("solve", run, "train.sequences_per_step=4")["best"]
    for key in ("num_subsequences", "schedule", "policy", *DEGREES):
        assert found[key] == solved[key]
    assert found["device_peak_bytes"] == solved["predicted"]["device_peak_bytes"]
    assert set(found["chosen_by_solve"]) >= {f"parallel.{key}" for key in DEGREES}
    assert f"chosen by solve: parallel.{DEGREES[0]}, " in one_line(succeed("estimate", run))
    one = report(run, "parallel.sequence_parallel_degree=2", "hardware.devices_per_node=4")
    assert one["sequence_parallel_degree"] == 2
    assert "parallel.sequence_parallel_degree" not in one["chosen_by_solve"]
    assert report(run, *ALONE)["chosen_by_solve"] == []


def test_host_memory_of_a_device_and_of_a_node_is_one_number_in_every_command(run):
    words = (run, "activations.policy=offload_all", "train.sequences_per_step=4")
    found = report(*words)
    simulated, solved = answer("simulate", *words), answer("solve", *words)["best"]
    assert 0 < found["host_peak_bytes"] < found["node_host_peak_bytes"]
    assert solved["predicted"]["host_peak_bytes"] == found["host_peak_bytes"]
    assert simulated["host_peak_bytes"] == found["host_peak_bytes"]
    for command in (simulated, solved):
        assert command["node_host_peak_bytes"] == found["node_host_peak_bytes"]
    for command in ("estimate", "simulate"):
        assert "host memory: " in succeed(command, *words)


def test_what_does_not_fit_is_said_and_is_no_error():
    words = (EXAMPLE, *ALONE, "sequence.num_subsequences=16")
    found = report(*words)
    assert found["fits"] is False
    assert found["virtual_stages"] > 1  # what is short of least
    assert found["shortfall"]["bucket"] == "activations"
    text = one_line(succeed("estimate", *words))
    assert "does not fit: rank 0 needs" in text
    assert "sppo solve says what would" in text


def test_cut_stages_of_a_deep_pipeline(run):
    words = (run, "parallel.pipeline_parallel_degree=8", "train.sequences_per_step=8")
    assert len(report(*words)["stages"]) == 8
    assert "more kinds of ranks; --json lists all" in succeed("estimate", *words)


def test_a_plan_is_no_run_file(run):
    succeed("solve", run, "-o", "plan.json")
    error = refuse("estimate", "plan.json")
    assert "plan.json has 1 problem\n  a plan of sppo solve, not a run file" in error


def test_validations(tmp_path):
    path = write_run(
        tmp_path / "run.yaml",
        model={"preset": "llama-3.2-1b", "vocab_size": 128256, "num_layers": 2},
        sequence={"length": "64Ki", "num_subsequences": 8, "alignment": 128},
        hardware={"preset": "h100", "devices_per_node": 1},
        train={"dtype": "bf16"},
        validation={"every": 10, "sets": {"a": {"tokens": "nowhere", "sequences": 5}}},
    )
    assert "validation: 5 sequences every 10 steps, " in succeed("estimate", path)
    short = write_tokens(tmp_path / "short", num_tokens=1000)  # less than one sequence
    found = succeed("estimate", path, f"validation.sets.a.tokens={short}")
    assert "validation: 5 sequences every 10 steps, " in found
    solved = json.loads(succeed("solve", path, "--json"))["validation"]
    (own,) = solved["sets"]
    assert (own["name"], own["sequences"], own["num_subsequences"]) == ("a", 5, 8)
    assert own["seconds"] == solved["seconds"] > 0
    assert solved["problem"] is None
    longer = json.loads(succeed("estimate", path, "validation.sets.a.length=64Mi", "--json"))
    problem = longer["validation"]["problem"]
    assert problem.startswith("validation.sets.a: a sequence of 67108864 tokens needs ")
