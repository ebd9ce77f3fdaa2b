"""Steps of samples on a fake GPU: each step holds its planned memory, with all accesses ordered."""

from __future__ import annotations

import pytest

from sppo.planning.elastic.longest_samples import run_of_longest_samples
from tests.dry_run.cases import plan_for_gpu, small_run
from tests.dry_run.orderings import OrderingCheck
from tests.dry_run.test_traced_step import UNCOUNTED_BYTES
from tests.dry_run.traced_step import trace_step
from tests.planning.cases import run_config
from tests.tiers import default_of, exhaustive

SAMPLES = {"data": {"tokens": "data", "samples": "documents"}, "train": {"samples_per_step": 6}}
MODEL = {
    "vocab_size": 1024, "hidden_size": 1024, "num_layers": 2, "num_heads": 16, "num_kv_heads": 4,
    "mlp_size": 3072,
}  # fmt: skip
LAYOUTS = {
    "one rank": ("keep_attention", {}),
    "one rank, offloaded": ("offload_all", {}),
    "pipeline": ("sppo", {"pipeline_parallel_degree": 2}),
    "deferred weight halves": (
        "retain",
        {"pipeline_parallel_degree": 2, "schedule": "seq_zb_h1"},
    ),
    "looped": ("retain", {"pipeline_parallel_degree": 2, "virtual_stages": 2}),
    "ulysses": ("hybrid", {"sequence_parallel_degree": 2}),
    "megatron": ("recompute", {"sequence_parallel_degree": 2, "sequence_parallel": "megatron"}),
}
STEP = (9001, 300, 5, 1200, 23999, 77, 1, 2500)
SMALL_STEPS = ((100, 3, 256, 40, 1, 9), (7, 256, 180, 64, 65, 30, 2))


def planned_samples(run):
    run = run_of_longest_samples(run)
    return run, plan_for_gpu(run)


@pytest.mark.parametrize("name", default_of(LAYOUTS, "one rank, offloaded"))
def test_a_step_holds_what_was_planned_for_it(name):
    policy, degrees = LAYOUTS[name]
    one = {"pipeline_parallel_degree": 1, "data_parallel_degree": 1, "sequence_parallel_degree": 1}
    run, plan = planned_samples(
        run_config(
            {**MODEL, "num_layers": 2 * degrees.get("virtual_stages", 1)},
            length=24000,
            sequence={"num_subsequences": 4},
            hardware={"preset": "h100", "devices_per_node": 2 if degrees else 1},
            activations={"policy": policy},
            parallel={**one, **degrees},
            **SAMPLES,
        )
    )
    for rank in range(plan.pipeline_parallel_degree):
        step = trace_step(run, plan, rank=rank, samples=(STEP, STEP))
        assert not any("engine" in where for where in step.host_waits)
        planned_bytes, held = step.buckets["all"]
        assert 0.85 * planned_bytes <= held <= 1.001 * planned_bytes + UNCOUNTED_BYTES
        for bucket in ("K/V and gradients", "activations", "copies"):
            if bucket in step.buckets:
                planned_bytes, held = step.buckets[bucket]
                assert held <= 1.001 * planned_bytes, (rank, bucket)


@pytest.mark.parametrize(
    "sections",
    [
        *exhaustive({"activations": {"policy": "offload_all"}}),
        {
            "activations": {"policy": "offload_all"},
            "parallel": {"pipeline_parallel_degree": 2, "schedule": "seq_zb_h1"},
        },
    ],
    ids=["one rank", "pipeline"],
)
def test_all_work_on_the_same_memory_is_ordered(sections):
    """Also between steps of different lengths, whose slots lie elsewhere."""
    run, plan = planned_samples(small_run(**sections, **SAMPLES))
    check = OrderingCheck()
    trace_step(run, plan, samples=SMALL_STEPS, orderings=check)
    assert not check.unordered
    assert check.num_accesses > 1000
