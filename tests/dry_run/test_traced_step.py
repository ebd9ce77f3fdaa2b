"""Memory of a traced step against its plan, for back ends, policies, models and layouts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from typer.testing import CliRunner

from sppo.cli.app import app
from sppo.cli.output.trace_table import _fullest
from sppo.cost.attention_backend import planned_backend
from sppo.cost.layer import Workload
from sppo.dry_run.streams import Moment
from sppo.dry_run.traced_run import RunTracer, _extrapolated
from sppo.dry_run.traced_step import trace_step
from sppo.hardware.file import hardware_for
from sppo.hardware.presets import PRESETS
from sppo.kernels.attention.choice import CAPABILITIES
from sppo.planning.estimate import estimate
from sppo.units import MIB
from tests.dry_run.cases import plan_for_gpu, planned
from tests.planning.cases import run_config
from tests.tiers import default_of, each_once, exhaustive

TWO_LAYERS = {
    "llama": {
        "vocab_size": 1024, "hidden_size": 2048, "num_layers": 2, "num_heads": 32,
        "num_kv_heads": 8, "mlp_size": 8192,
    },
    "qwen3": {
        "vocab_size": 1024, "hidden_size": 1024, "num_layers": 2, "num_heads": 16,
        "num_kv_heads": 8, "head_size": 128, "mlp_size": 3072, "qk_norm": True,
    },
    "gpt": {
        "vocab_size": 1024, "hidden_size": 1024, "num_layers": 2, "num_heads": 16,
        "mlp_size": 4096, "mlp": "gelu", "norm": "layernorm", "position": "learned",
        "max_positions": 32768, "qkv_bias": True, "output_bias": True, "mlp_bias": True,
    },
    "large vocabulary": {
        "vocab_size": 128256, "hidden_size": 512, "num_layers": 2, "num_heads": 8, "mlp_size": 1024,
    },
}  # fmt: skip
POLICIES = ("retain", "keep_attention", "recompute", "sppo", "offload_all", "hybrid")
BETWEEN = 0.97, 1.001
"""Traced over planned bytes of one rank alone, where nothing is exchanged."""
ALL_OFFLOADED = 0.95, 1.001
"""The same where every layer's gradient comes while the block of another layer leaves."""
UNCOUNTED_BYTES = 8 * MIB
"""Tokens, positions, losses, tables of addresses."""


def run_of(model, policy, *, preset="h100", length=24001, pieces=3, **sections):
    return run_config(
        TWO_LAYERS[model] if isinstance(model, str) else model,
        length=length,
        sequence={"num_subsequences": pieces},
        hardware={"preset": preset, "devices_per_node": 1},
        activations={"policy": policy},
        **{"parallel": {"virtual_stages": 1}, **sections},
    )


def assert_as_planned(step, between=BETWEEN):
    for name, (planned_bytes, held) in step.buckets.items():
        if name == "process growth":
            assert held < UNCOUNTED_BYTES
        elif planned_bytes:
            low, high = between
            slack = UNCOUNTED_BYTES if name == "all" else 0
            assert low * planned_bytes <= held <= high * planned_bytes + slack, name


@pytest.mark.parametrize(
    ("model", "policy", "preset"), each_once(TWO_LAYERS, POLICIES, ["h100", "a100-80g"])
)
def test_one_rank_holds_what_is_planned(model, policy, preset):
    run = run_of(model, policy, preset=preset)
    between = ALL_OFFLOADED if policy == "offload_all" else BETWEEN
    assert_as_planned(trace_step(run, plan_for_gpu(run)), between)


@pytest.mark.parametrize("policy", ["retain", *exhaustive("recompute")])
def test_fp32_holds_what_is_planned(policy):
    run = run_of("llama", policy, train={"dtype": "fp32"})
    step = trace_step(run, plan_for_gpu(run))
    assert step.backend == "triton"
    assert_as_planned(step)


LAYOUTS = {
    "multiplexed": {
        "activations": {"policy": "offload_all"},
        "parallel": {"pipeline_parallel_degree": 2, "schedule": "sppo_msp"},
    },
    "multiplexed, looped": {
        "activations": {"policy": "offload_all"},
        "parallel": {
            "pipeline_parallel_degree": 2,
            "schedule": "sppo_msp",
            "virtual_stages": 2,
        },
    },
    "pipeline": {
        "activations": {"policy": "keep_attention"},
        "parallel": {"pipeline_parallel_degree": 2, "schedule": "sppo"},
    },
    "pipeline, offloaded": {
        "activations": {"policy": "offload_all"},
        "parallel": {"pipeline_parallel_degree": 2, "schedule": "sppo"},
    },
    "deferred weight halves": {
        "activations": {"policy": "sppo"},
        "train": {"sequences_per_step": 2},
        "parallel": {"pipeline_parallel_degree": 2, "schedule": "seq_zb_h1"},
    },
    "ulysses": {"parallel": {"sequence_parallel_degree": 4}},
    "megatron": {"parallel": {"sequence_parallel_degree": 4, "sequence_parallel": "megatron"}},
    "zero 3": {
        "train": {"sequences_per_step": 2},
        "parallel": {"data_parallel_degree": 2, "zero": 3},
    },
    "one long subsequence": {"sequence": {"num_subsequences": 1, "length": 65536}},
}


@pytest.mark.parametrize("preset", ["a100-80g", *exhaustive("h100")])
@pytest.mark.parametrize("name", default_of(LAYOUTS, "multiplexed"))
def test_no_bucket_of_a_layout_holds_more_than_planned(name, preset):
    """Where ranks exchange something the plan may be above the trace, and is by up to 10 %."""
    sections = LAYOUTS[name]
    degrees = {"data_parallel_degree": 1, "sequence_parallel_degree": 1}
    degrees |= {"pipeline_parallel_degree": 1, **sections.get("parallel", {})}
    run = run_config(
        {**TWO_LAYERS["qwen3"], "num_layers": 2 * degrees.get("virtual_stages", 1)},
        length=24576,
        **{
            "sequence": {"num_subsequences": 4},
            "activations": {"policy": "keep_attention"},
            "hardware": {"preset": preset},
            **sections,
            "parallel": degrees,
        },
    )
    plan = plan_for_gpu(run)
    for rank in range(plan.pipeline_parallel_degree):
        step = trace_step(run, plan, rank=rank)
        for bucket, (planned_bytes, held) in step.buckets.items():
            if bucket == "process growth":
                assert held < UNCOUNTED_BYTES
                continue
            slack = UNCOUNTED_BYTES if bucket == "all" else 0
            assert held <= 1.001 * planned_bytes + slack, (rank, bucket)
        assert held >= 0.9 * planned_bytes


def test_one_step_waits_for_the_gpu_only_at_its_end():
    run, plan = planned("to the host")
    step = trace_step(run, plan)
    assert sum(step.host_waits.values()) == 4
    assert not any("engine" in where for where in step.host_waits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["retain", "sppo"])
def test_launches_grow_with_layers(policy):
    run = run_of({**TWO_LAYERS["llama"], "num_layers": 6}, policy, preset="a100-80g")
    found = estimate(run, hardware=hardware_for(run.hardware))
    whole = RunTracer(found).trace()
    extrapolated = RunTracer(found, layers=2).trace()
    assert extrapolated.traced_layers == (2, 4)
    assert extrapolated.fullest == whole.fullest
    for name, pair in whole.buckets.items():
        slack = UNCOUNTED_BYTES if name == "process growth" else 0
        assert extrapolated.buckets[name] == pytest.approx(pair, rel=0.01, abs=slack), name
    for kind, counts in whole.actions.items():
        launches = extrapolated.actions[kind].launches
        assert launches == pytest.approx(counts.launches, rel=0.01), kind


def test_fewer_layers_place_the_rows_of_all():
    """The policy would offload other rows of them, for a layer less is computed in less time."""
    run = run_of({**TWO_LAYERS["llama"], "num_layers": 6}, "sppo", preset="a100-80g")
    tracer = RunTracer(estimate(run, hardware=hardware_for(run.hardware)), layers=1)
    fewer_run, fewer = tracer._with_layers(1)
    assert [stage.num_layers for stage in fewer.stages] == [1]
    assert rows(fewer) == rows(tracer.plan) != rows(plan_for_gpu(fewer_run))
    assert any(offloaded for _, offloaded, _ in rows(fewer))


def rows(plan):
    return [
        (part.retained, part.offloaded, part.recomputed)
        for stage in plan.stages
        for part in stage.subsequences
    ]


def test_another_moment_may_be_fullest_with_more_layers():
    step = trace_step(*planned("to the host"))
    loss, layer = Moment("0F0.3", "loss"), Moment("0B0.3", "layer")
    few = replace(step, num_layers=2, peaks={loss: 100, layer: 60}, peak_bytes=100)
    more = replace(step, num_layers=4, peaks={loss: 110, layer: 100}, peak_bytes=110)
    whole = _extrapolated(few, more, layers=8)
    assert whole.peaks == {loss: 130, layer: 180}
    assert whole.peak_bytes == 180
    assert whole.measured.working_bytes == step.measured.working_bytes + 180 - 130
    assert _fullest(whole) == (
        "most is used in 0B0.3, layer; with 2 layers in 0F0.3, loss; with 4 layers in 0F0.3, loss"
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_planned_back_end_can_do_the_case(preset, dtype):
    hardware = PRESETS[preset]
    if hardware.device.kind != "cuda":
        return
    for size, window in ((64, None), (128, None), (256, None), (80, None), (128, 512)):
        model = run_config({**TWO_LAYERS["llama"], "head_size": size, "sliding_window": window})
        name = planned_backend(Workload(model.model, hardware, dtype=dtype))
        able = CAPABILITIES[name]
        assert {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype] in able.dtypes
        assert able.max_head_size is None or size <= able.max_head_size
        assert size % able.head_size_multiple == 0
        assert window is None or able.window


def invoke(tmp_path, *args):
    run = tmp_path / "run.yaml"
    sections = {"model": TWO_LAYERS["qwen3"], "data": {"tokens": "data"}}
    run.write_text(json.dumps({**sections, "hardware": {"devices_per_node": 1}}))
    words = ["estimate", str(run), "sequence.length=8Ki", "sequence.num_subsequences=2", *args]
    return CliRunner().invoke(app, words)


def test_prints_what_was_traced(tmp_path):
    result = invoke(tmp_path, "hardware.preset=a100-80g", "--trace", "--json")
    assert result.exit_code == 0, result.output
    traced = json.loads(result.stdout)["trace"]
    working = traced["buckets"]["working set"]
    assert 0.97 * working["predicted_bytes"] <= working["traced_bytes"]
    assert traced["attention_backend"] == "flash_attn_2"
    assert traced["actions"]["B"]["launches"] > traced["actions"]["F"]["launches"]


def test_prints_a_table(tmp_path):
    result = invoke(tmp_path, "hardware.preset=a100-80g", "--trace", "--layers", "1")
    assert result.exit_code == 0, result.output
    assert "2 layers, extrapolated from 1 and 2" in result.stdout
    waits = "the host waits for the GPU: 2 x __float__() in training.steps.step.run_step"
    assert waits in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["hardware.preset=laptop-cpu", "--trace"], "is a CPU: name a machine with GPUs"),
        (["hardware.preset=h100", "--trace", "--layers", "2"], "write 1 to 1, or leave it out"),
        (["hardware.preset=h100", "--layers", "1"], "--layers says what --trace traces"),
    ],
)
def test_refuses_what_it_cannot_trace(tmp_path, args, message):
    result = invoke(tmp_path, *args)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_a_trace_leaves_nothing_behind():
    """No tensor without data stays in a table that another trace, or a GPU, would find."""
    run, plan = planned("to the host")
    trace_step(run, plan)
    gc.collect()
    left = [x for x in gc.get_objects() if type(x) is FakeTensor]
    assert not left
    assert "dry_run" not in getattr(torch.cuda.Stream, "__module__", "")


@pytest.mark.exhaustive
def test_fp32_is_traced_without_the_interpreter(tmp_path):
    run = tmp_path / "run.yaml"
    sections = {"model": TWO_LAYERS["qwen3"], "data": {"tokens": "data"}}
    run.write_text(json.dumps({**sections, "hardware": {"preset": "a100-80g"}}))
    words = ["sequence.length=1Ki", "train.dtype=fp32", "hardware.devices_per_node=1"]
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "sppo", "estimate", run, *words, "--trace", "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trace"]["attention_backend"] == "triton"


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sppo.cli.estimate.find_spec", lambda name: None)
    result = invoke(tmp_path, "hardware.preset=a100-80g", "--trace")
    assert result.exit_code == 2
    assert "torch is not installed: pip install torch" in result.stderr
