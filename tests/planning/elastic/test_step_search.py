"""Search for the plan of a step: never slower than chunks of a fixed size, and quick."""

from collections import Counter
from dataclasses import replace

import pytest

from sppo.config.model import ModelConfig
from sppo.cost.candidate import Candidate
from sppo.cost.packed_sequence import PackedSequence
from sppo.cost.workload import Workload
from sppo.data.samples.length_distributions import draw
from sppo.hardware.presets import PRESETS
from sppo.hardware.this_machine import divide_cpu
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.packing import PADDING
from sppo.planning.elastic.step_planner import StepPlanner, step_planner
from sppo.planning.partition import boundaries_by_length, lengths_of
from sppo.planning.run_plan import plan_run
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.schedule.checks import validate
from tests.make import make_run

SMALL = ModelConfig(
    vocab_size=512, hidden_size=64, num_layers=16, num_heads=1, num_kv_heads=1, mlp_size=256
)
LARGE = ModelConfig(
    vocab_size=50257, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=32, mlp_size=11008
)


def planner(longest, *, model=SMALL, hardware="laptop-cpu", ranks=4, sequence_parallel=1):
    workload = Workload(
        model, PRESETS[hardware], dtype="fp32", sequence_parallel_degree=sequence_parallel
    )
    cuts = boundaries_by_length(longest, num_subsequences=8, alignment=64)
    base = Candidate(workload, lengths_of(cuts), pipeline_parallel_degree=ranks)
    return StepPlanner(base, alignment=64, tries_sizes=True)


def fixed_chunks(lengths, tokens):
    """Long samples cut every so many tokens, each a sequence; short ones packed first-fit."""
    long, open_rows = [], []
    for length in lengths:
        row = next((row for row in open_rows if sum(row) + length <= tokens), None)
        if length > tokens:
            long.append([length])
        elif row is None:
            open_rows.append([length])
        else:
            row.append(length)
    return tuple(
        PackedSequence(
            tuple(row),
            tuple(min(tokens, sum(row) - begin) for begin in range(0, sum(row), tokens)),
        )
        for row in (*long, *open_rows)
    )


def fastest_fixed_s(planner, lengths, *, largest=14):
    chunks = [2**power for power in range(8, largest + 1)]
    found = [
        evaluate_candidate(planner.base.with_packed(fixed_chunks(lengths, size))) for size in chunks
    ]
    return min(one.step_s for one in found if one.shortfall is None)


def samples_of(plan):
    """How often each sample is in a plan."""
    return Counter(
        sample for samples in plan.packed.samples for sample in samples if sample != PADDING
    )


@pytest.mark.parametrize(("ranks", "margin"), [(2, 1.0), (4, 1.1), (8, 1.1)])
@pytest.mark.parametrize("name", ["magi", "github"])
def test_faster_than_the_best_fixed_chunks(name, ranks, margin):
    lengths = draw(name, 256, seed=1, scale=1 / 16, longest=12288)
    planned = planner(12288, ranks=ranks)
    plan = planned.plan(lengths)
    assert samples_of(plan) == Counter(range(256))
    assert fastest_fixed_s(planned, lengths) > margin * plan.step_s


@pytest.mark.parametrize("lengths", [(512,) * 64, (1000,) * 50, (6000,) * 8, (40,) * 300])
def test_not_slower_than_fixed_chunks_where_samples_are_alike(lengths):
    planned = planner(max(lengths), ranks=2)
    assert planned.plan(lengths).step_s <= 1.02 * fastest_fixed_s(planned, lengths)


@pytest.mark.parametrize("name", ["commoncrawl", "github", "magi"])
def test_one_rank_is_not_slower_than_fixed_chunks_of_any_size(name):
    """What 8 devices share may have several times as many tokens as what one has."""
    planned = planner(98304, model=LARGE, hardware="a100-80g", ranks=1, sequence_parallel=8)
    base = replace(planned.base, workload=replace(planned.base.workload, dtype="bf16"))
    planned = replace(planned, base=base)
    lengths = draw(name, 128, seed=1, longest=98304)
    plan = planned.plan(lengths)
    assert samples_of(plan) == Counter(range(128))
    assert max(plan.evaluated.candidate.lengths) > 16384
    assert plan.step_s <= 1.01 * fastest_fixed_s(planned, lengths, largest=17)


def test_smaller_subsequences_where_memory_is_short():
    lengths = draw("magi", 128, seed=0, scale=1 / 16, longest=12288)
    roomy = planner(12288)
    plan = roomy.plan(lengths)
    device = roomy.base.workload.hardware.device
    least = min(
        packing.sequences
        and evaluate_candidate(roomy.base.with_packed(packing.sequences)).device_peak_bytes
        for packing in roomy.packings(lengths)
    )
    assert least < plan.evaluated.device_peak_bytes
    tight = replace(
        device, memory_bytes=(least + plan.evaluated.device_peak_bytes) // 2, reserved_bytes=0
    )
    workload = roomy.base.workload
    hardware = replace(workload.hardware, device=tight)
    base = replace(roomy.base, workload=replace(workload, hardware=hardware), policy="retain")
    found = replace(roomy, base=base).plan(lengths)
    assert found.evaluated.shortfall is None
    assert samples_of(found) == samples_of(plan)


def test_many_small_subsequences_where_no_larger_ones_fit():
    model = SMALL.model_copy(
        update={"hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "mlp_size": 1024}
    )
    lengths, roomy = (500,) * 600, planner(500, model=model)
    base = replace(roomy.base, policy="recompute")
    needed = evaluate_candidate(base.with_packed(fixed_chunks(lengths, 1024))).device_peak_bytes
    hardware = base.workload.hardware
    device = replace(hardware.device, memory_bytes=needed * 51 // 50, reserved_bytes=0)
    workload = replace(base.workload, hardware=replace(hardware, device=device))
    tight = replace(roomy, base=replace(base, workload=workload))
    found = tight.plan(lengths)
    assert found.evaluated.candidate.schedule == base.schedule
    assert found.step_s <= 1.02 * fastest_fixed_s(tight, lengths)


def run_planner(schedule, *, ranks=2, virtual=8):
    """What plans the steps of a run on some ranks with so many stages each."""
    run = make_run(
        SMALL.model_dump(exclude_defaults=True),
        length=12288,
        data={"samples": "documents"},
        parallel={
            "pipeline_parallel_degree": ranks,
            "schedule": schedule,
            "virtual_stages": virtual,
        },
        train={"dtype": "bf16", "samples_per_step": 64},
    )
    plan = plan_run(
        run_of_longest_samples(run),
        hardware=divide_cpu(PRESETS["laptop-cpu"], ranks),
        available_bytes=8 << 30,
    )
    assert plan.virtual_stages == virtual
    return step_planner(plan)


def test_sequences_run_side_by_side_on_the_stages_of_a_looped_plan():
    lengths = draw("magi", 256, seed=2, scale=1 / 16, longest=12288)
    planned, asked = run_planner("auto").plan(lengths), run_planner("looped_bfs").plan(lengths)
    assert planned.evaluated.candidate.schedule == "interleaved_seq1f1b"
    assert asked.evaluated.candidate.schedule == "looped_bfs"
    assert planned.step_s < 0.98 * asked.step_s
    validate(planned.program)


def test_gradients_of_weights_are_put_off_where_that_is_faster():
    lengths = draw("magi", 96, seed=2, scale=1 / 16, longest=12288)
    planned, asked = (
        run_planner(schedule, ranks=4, virtual=1).plan(lengths) for schedule in ("auto", "sppo")
    )
    assert planned.evaluated.candidate.schedule == "seq_zb_h1"
    assert asked.evaluated.candidate.schedule == "sppo"
    assert planned.step_s <= 0.99 * asked.step_s
    validate(planned.program)
