"""Plans of validations: cuts, rows together, and lengths that do not fit."""

from dataclasses import replace

import pytest

from sppo.hardware.presets import PRESETS
from sppo.planning.evaluated_rows import rows_of, rows_of_replica
from sppo.planning.run_plan import executed_candidate
from sppo.planning.validation_plan import SetSamples, plan_validation
from tests.make import make_run


def planned(run, *, lengths, usable_bytes=None):
    hardware = PRESETS["h100"]
    if usable_bytes is not None:
        device = replace(hardware.device, memory_bytes=usable_bytes, reserved_bytes=0)
        hardware = replace(hardware, device=device)
    step = executed_candidate(run, hardware=hardware)
    found = plan_validation(
        run,
        candidate=step.candidate,
        training=step.memory,
        step_s=step.step_s,
        samples={name: SetSamples(own, sum(own)) for name, own in lengths.items()},
    )
    return step, found


def run_of(length="64Ki", parallel=(), **sets):
    return make_run(
        "llama-3.2-1b",
        length=length,
        parallel={"pipeline_parallel_degree": 2, **dict(parallel)},
        hardware={"preset": "h100"},
        validation={"every": 10, "sets": sets},
    )


def test_as_long_as_a_step():
    run = run_of(held_out={"tokens": "x"})
    step, plan = planned(run, lengths={"held_out": [1 << 16] * 6})
    (own,) = plan.sets
    assert own.boundaries[-1] == 1 << 16
    assert len(own.boundaries) == 1 + len(step.candidate.lengths)
    assert own.peak_bytes < step.device_peak_bytes
    assert plan.problem is None
    assert 0 < plan.share < 0.5
    assert plan.seconds < 6 * step.step_s
    assert plan.text().startswith("6 sequences every 10 steps, ")


def test_few_subsequences_fill_the_pipeline_together():
    run = run_of("2Ki", {"pipeline_parallel_degree": 4}, held_out={"tokens": "x"})
    _, plan = planned(run, lengths={"held_out": [2048] * 16})
    assert plan.sets[0].at_once == 4
    _, alone = planned(run, lengths={"held_out": [2048]})
    assert alone.sets[0].at_once == 1
    assert plan.seconds < 0.6 * 16 * alone.seconds


def test_longest_length_that_fits():
    run = run_of("16Ki", {"pipeline_parallel_degree": 1}, long={"tokens": "x", "length": "4Mi"})
    _, plan = planned(run, lengths={"long": [4 << 20]})
    assert plan.problem.startswith("validation.sets.long: a sequence of 4194304 tokens needs ")
    longest = int(plan.problem.partition("write length: ")[2].partition(",")[0])
    for length, fits in ((longest, True), (longest + 1024, False)):
        again = run_of(
            "16Ki", {"pipeline_parallel_degree": 1}, long={"tokens": "x", "length": length}
        )
        _, plan = planned(again, lengths={"long": [length]})
        assert (plan.problem is None) is fits


@pytest.mark.parametrize("degree", [1, 3])
def test_rows_have_every_sample_once(degree):
    samples = [5, 1, 90, 7, 64, 3, 65, 128, 66]
    boundaries = (0, 32, 64, 96, 128)
    rows = [*rows_of(samples, boundaries=boundaries, packs=True, degree=degree)]
    assert [sample for row in rows for sample in row.samples] == [*range(9)]
    for row in rows:
        tokens = sum(samples[sample] for sample in row.samples)
        assert row.boundaries[-1] == max(tokens, degree)
        steps = [b - a for a, b in zip(row.boundaries, row.boundaries[1:], strict=False)]
        assert degree <= min(steps)
        assert max(steps) <= 32 or len(row.samples) == 1


def test_replicas_have_as_many_subsequences():
    rows = [*rows_of([128, 5, 60], boundaries=(0, 32, 64, 96, 128), packs=True)]
    first, second = (rows_of_replica(rows, replica=r, replicas=2, degree=2) for r in range(2))
    assert [row.num_subsequences for row in first] == [row.num_subsequences for row in second]
    assert [row.samples for row in (*first, *second)] == [(0,), (2,), (1,), ()]
