"""Memory of a traced step against its plan, for back ends, policies, models and layouts."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from sppo.cost.attention_backend import planned_backend
from sppo.cost.parameters import num_parameters
from sppo.cost.workload import Workload
from sppo.engine import unit
from sppo.hardware.presets import PRESETS
from sppo.kernels.attention.choice import CAPABILITIES
from sppo.units import MIB
from tests.dry_run.cases import CASES, plan_for_gpu, planned
from tests.dry_run.traced_step import trace_step
from tests.planning.cases import run_config
from tests.tiers import each_once, exhaustive

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
    "experts": {
        "vocab_size": 1024, "hidden_size": 1024, "num_layers": 2, "num_heads": 16,
        "num_kv_heads": 4, "head_size": 128, "mlp_size": 3072, "qk_norm": "head",
        "experts": {"count": 16, "per_token": 4, "mlp_size": 512, "normalize": True},
    },
    "norms of outputs": {
        "vocab_size": 1024, "hidden_size": 1024, "num_layers": 2, "num_heads": 16,
        "num_kv_heads": 4, "mlp_size": 4096, "norm_placement": "post", "qk_norm": "all",
        "sliding_window": 2048, "layer_types": ["full", "sliding"], "sliding_rope_theta": 1e4,
    },
    "sinks": {
        "vocab_size": 1024, "hidden_size": 1024, "num_layers": 2, "num_heads": 16,
        "num_kv_heads": 4, "mlp_size": 4096, "mlp": "swiglu_clamped", "attention_sinks": True,
        "norm_placement": "both", "residual_scale": 0.5,
    },
    "hybrid": {
        "vocab_size": 1024, "hidden_size": 1024, "num_layers": 2, "num_heads": 16,
        "num_kv_heads": 4, "head_size": 64, "mlp_size": 3072, "qk_norm": "head",
        "attention_gate": True, "layer_types": ["full", "linear"],
        "linear_attention": {"key_heads": 4, "value_heads": 8},
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


def run_of(model, policy, *, preset="h100", length=16001, pieces=2, **sections):
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


@pytest.mark.parametrize("policy", ["recompute", *exhaustive("retain")])
def test_a_shared_mlp_and_a_first_dense_layer_take_what_is_planned(policy):
    experts = {
        **TWO_LAYERS["experts"]["experts"], "score": "sigmoid", "choice_bias": True,
        "shared_mlp_size": 512, "dense_layers": 1,
    }  # fmt: skip
    run = run_of({**TWO_LAYERS["experts"], "experts": experts}, policy)
    assert_as_planned(trace_step(run, plan_for_gpu(run)))


@pytest.mark.parametrize("policy", ["keep_attention", *exhaustive("recompute", "sppo")])
def test_a_wide_first_layer_runs_when_later_layers_have_freed_theirs(policy):
    """It is never the first in backward, so its working set is beside fewer saved tensors."""
    experts = {**TWO_LAYERS["experts"]["experts"], "shared_mlp_size": 512, "dense_layers": 1}
    windows = {"sliding_window": 1024, "layer_types": ["sliding", "full"]}
    sizes = {"num_layers": 4, "mlp_size": 8192, "experts": experts}
    run = run_of({**TWO_LAYERS["experts"], **windows, **sizes}, policy)
    assert_as_planned(trace_step(run, plan_for_gpu(run)))


def test_fp32_holds_what_is_planned():
    run = run_of("llama", "retain", train={"dtype": "fp32"}, length=3001)
    step = trace_step(run, plan_for_gpu(run))
    assert step.backend == "torch_blocks"
    assert_as_planned(step)


@pytest.mark.parametrize(
    ("policy", "kv", "pattern"),
    [
        ("keep_attention", "recompute", ["sliding"]),
        pytest.param("retain", "retain", ["sliding", "full"], marks=pytest.mark.exhaustive),
    ],
)
def test_layers_with_windows_hold_what_is_planned(policy, kv, pattern):
    """The layer that holds most is last, so that all saved tensors are there, too."""
    windows = {"num_layers": 4, "sliding_window": 1024, "layer_types": pattern}
    run = run_config(
        {**TWO_LAYERS["qwen3"], **windows},
        length=16001,
        sequence={"num_subsequences": 4},
        hardware={"preset": "h100", "devices_per_node": 1},
        parallel={"virtual_stages": 1},
        activations={"policy": policy, "kv": kv},
    )
    plan = plan_for_gpu(run)
    assert plan.windowed_kv == ("recomputed" if kv == "recompute" else "retained")
    step = trace_step(run, plan)
    assert_as_planned(step)
    planned_bytes, held = step.buckets["K/V and gradients"]
    assert planned_bytes == held


def test_a_hybrid_holds_what_is_planned():
    """The recurrence holds most, and is last, so that all saved tensors are there, too."""
    run = run_of("hybrid", "recompute")
    step = trace_step(run, plan_for_gpu(run))
    assert_as_planned(step)
    planned_bytes, held = step.buckets["K/V and gradients"]
    assert planned_bytes == held


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", ["device", "host"])
def test_moments_in_bf16_take_what_is_planned(tier):
    state, optimizer = {"optimizer": tier}, {"moments": "bf16"}
    run = run_of("qwen3", "retain", state=state, optimizer=optimizer, length=1024)
    plan = plan_for_gpu(run)
    assert_as_planned(trace_step(run, plan))
    wide = plan_for_gpu(run.with_values({"optimizer.moments": "fp32"})).stages[0].memory
    narrow, parameters = plan.stages[0].memory, num_parameters(run.model)
    bytes_of = "optimizer_bytes" if tier == "device" else "host_optimizer_bytes"
    ours, theirs = (
        getattr(memory.device if tier == "device" else memory, bytes_of)
        for memory in (narrow, wide)
    )
    assert (ours, theirs) == (8 * parameters, 12 * parameters)


LAYOUTS = {
    name: CASES[name]
    for name in (
        *("multiplexed", "multiplexed, looped", "pipeline", "deferred weight halves"),
        *("ulysses", "megatron", "zero 3"),
    )
} | {
    "pipeline, offloaded": {**CASES["pipeline"], "activations": {"policy": "offload_all"}},
    "one long subsequence": {"sequence": {"num_subsequences": 1, "length": 65536}},
}


OF_EXPERTS = "multiplexed", "ulysses", "zero 3", "deferred weight halves"
OF_HYBRIDS = "zero 3", "pipeline, offloaded"


@pytest.mark.parametrize("preset", ["a100-80g", *exhaustive("h100")])
@pytest.mark.parametrize(
    ("name", "model"),
    [
        *(("multiplexed", model) for model in ("qwen3", "experts")),
        *(
            pytest.param(name, model, marks=pytest.mark.exhaustive)
            for model, names in (
                *(("qwen3", LAYOUTS), ("experts", OF_EXPERTS), ("hybrid", OF_HYBRIDS)),
            )
            for name in names
            if name != "multiplexed"
        ),
    ],
)
def test_no_bucket_of_a_layout_holds_more_than_planned(name, model, preset):
    """Where ranks exchange something the plan may be above the trace, and is by up to 12 %."""
    sections = LAYOUTS[name]
    degrees = {"data_parallel_degree": 1, "sequence_parallel_degree": 1}
    degrees |= {"pipeline_parallel_degree": 1, **sections.get("parallel", {})}
    run = run_config(
        {**TWO_LAYERS[model], "num_layers": 2 * degrees.get("virtual_stages", 1)},
        length=24576,
        **{
            "sequence": {"num_subsequences": 4},
            "activations": {"policy": "keep_attention"},
            "hardware": {"preset": preset},
            **{section: keys for section, keys in sections.items() if section != "model"},
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
        assert held >= 0.88 * planned_bytes


def test_a_step_waits_for_the_gpu_only_at_its_end_and_a_trace_leaves_nothing_behind():
    """No tensor without data stays in a table that another trace, or a GPU, would find."""
    run, plan = planned("to the host")
    step = trace_step(run, plan)
    assert sum(step.host_waits.values()) == 4
    assert not any("engine" in where for where in step.host_waits)
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is FakeTensor]
    assert "dry_run" not in getattr(torch.cuda.Stream, "__module__", "")


@pytest.mark.parametrize("ignored", [1, *exhaustive(3000)])
def test_labels_that_do_not_count_take_no_memory_and_no_wait(ignored, monkeypatch):
    """Of each unit the first labels; the peak is in the head, of whose input rows are selected."""
    model = {
        "vocab_size": 128256, "hidden_size": 2048, "num_layers": 1, "num_heads": 8, "head_size": 64,
        "mlp_size": 512,
    }  # fmt: skip
    run = run_of(model, "recompute", length=8001, pieces=1)
    plan = plan_for_gpu(run)
    whole = trace_step(run, plan)
    monkeypatch.setattr(unit, "counting_labels", partial(last_labels, ignored=ignored))
    some = trace_step(run, plan)
    assert some.host_waits == whole.host_waits
    for bucket, (_, held) in some.buckets.items():
        assert held <= whole.buckets[bucket][1] + MIB, bucket


def last_labels(labels_S, parts, *, device, ignored):
    """The labels of each part without the first ``ignored`` of them: fake labels have no values."""
    for part in parts:
        rows = torch.arange(ignored, part.stop - part.start)
        positions = part.start + rows
        yield unit.UnitLabels(
            unit.copied(labels_S[positions], device), unit.copied(rows, device), positions
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
