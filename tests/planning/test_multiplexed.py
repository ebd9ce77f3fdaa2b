"""Units sharded over pipeline ranks (MSP), with one stage on a rank or an open number."""

from __future__ import annotations

import pytest

from sppo.hardware.run_hardware import hardware_for
from sppo.planning.corpus.search import DrawnSteps, solve_corpus
from sppo.planning.estimate import estimate
from sppo.planning.run_plan import executed_candidate, plan_run
from sppo.planning.search.candidates import candidates_of_degrees, with_schedule
from sppo.planning.search.choices import Degrees, degree_problems, multiplexed_problem
from sppo.planning.search.solver import solve
from tests.planning.cases import run_config


def multiplexed(**parallel):
    return run_config("llama-3.2-1b", length="32Ki", parallel={"multiplexed": "on", **parallel})


def planned(run, *, hardware):
    return plan_run(run, hardware=hardware, available_bytes=hardware.device.usable_bytes)


LENDS = "no rank has them: write ulysses"
REFUSED = [
    ({"multiplexed": "on", "pipeline_parallel_degree": 1}, "and there is one: raise"),
    ({"multiplexed": "on", "sequence_parallel": "megatron"}, LENDS),
    ({"multiplexed": "on", "zero": 3}, LENDS),
    ({"multiplexed": "auto", "schedule": "sppo_msp", "sequence_parallel": "megatron"}, LENDS),
    ({"multiplexed": "auto", "schedule": "sppo_msp", "zero": 3}, LENDS),
]
"""Keys of ways to ask for units cut over ranks that cannot work, and what is said of them."""


@pytest.mark.parametrize("command", [solve, estimate, executed_candidate, planned])
@pytest.mark.parametrize(("keys", "said"), REFUSED)
def test_every_command_refuses_alike(command, keys, said):
    degrees = {"pipeline_parallel_degree": 2, "sequence_parallel_degree": 4}
    run = multiplexed(data_parallel_degree=1, **{**degrees, **keys})
    ((key, rule),) = degree_problems(run, degrees=Degrees.of_run(run))
    assert key in keys
    with pytest.raises(ValueError, match=said) as refused:
        command(run, hardware=hardware_for(run.hardware))
    assert str(refused.value) == rule


def test_replicas_share_the_sequences_of_a_step_evenly():
    run = multiplexed(pipeline_parallel_degree=2, data_parallel_degree=2)
    uneven = run.parallel.model_copy(update={"data_parallel_degree": 3})
    run = run.model_copy(update={"parallel": uneven})
    with pytest.raises(ValueError, match="cannot be divided evenly"):
        executed_candidate(run, hardware=hardware_for(run.hardware))


def test_units_of_many_samples_are_not_shared():
    asked = {"multiplexed": "on"}
    documents = {"tokens": "data", "samples": "documents"}
    train = {"samples_per_step": 3}
    run = run_config("llama-3.2-1b", length="32Ki", data=documents, parallel=asked, train=train)
    ((key, rule),) = degree_problems(run, degrees=Degrees.of_run(run))
    assert key in asked
    steps = DrawnSteps("", "", ((32768, 1024, 512),))
    with pytest.raises(ValueError, match="hold many samples") as refused:
        solve_corpus(run, hardware=hardware_for(run.hardware), steps=steps)
    assert str(refused.value) == rule


def test_sequences_whose_experts_are_balanced_are_not_shared():
    asked = {"multiplexed": "on", "pipeline_parallel_degree": 2}
    run = run_config("gpt-oss-20b", length="32Ki", parallel=asked, routing={"balance_loss": 0.01})
    ((key, rule),) = degree_problems(run, degrees=Degrees.of_run(run))
    assert key in asked
    assert "routing.balance_loss needs the loads of all of it" in rule


def test_sequences_with_states_are_not_shared():
    asked = {"schedule": "sppo_msp", "pipeline_parallel_degree": 2}
    run = run_config("qwen3.5-4b", length="32Ki", parallel=asked)
    ((key, rule),) = degree_problems(run, degrees=Degrees.of_run(run))
    assert key == "schedule"
    assert "model.linear_attention needs the state behind one for the next" in rule
    free, node = run_config("qwen3.5-4b", length="32Ki"), hardware_for(run.hardware)
    plain, *_ = candidates_of_degrees(free, hardware=node, degrees=Degrees(1, 2, 1))
    assert with_schedule(free, plain, "seq_zb_h1") is not None
    assert with_schedule(free, plain, "sppo_msp") is None


@pytest.mark.parametrize("shards", [{"sequence_parallel": "megatron"}, {"zero": 3}])
def test_on_one_pipeline_rank_the_schedule_shares_nothing(shards):
    run = run_config("llama-3.2-1b", length="32Ki", parallel={"schedule": "sppo_msp", **shards})
    best = solve(run, hardware=hardware_for(run.hardware)).best
    assert best.candidate.schedule == "sppo_msp"
    assert best.degrees.pipeline_parallel == 1 or best.degrees.sequence_parallel == 1
    assert not multiplexed_problem(run, degrees=best.degrees)


def test_degrees_that_are_left_open_have_several_stages():
    run = multiplexed()
    solution = solve(run, hardware=hardware_for(run.hardware))
    ways = [solution.best, *solution.runners_up]
    assert all(way.degrees.pipeline_parallel > 1 for way in ways)
    refused = [r for r in solution.rejected if r.degrees.pipeline_parallel == 1]
    assert refused
    assert all("and there is one" in rejection.reason for rejection in refused)
