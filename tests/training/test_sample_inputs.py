"""Runs of samples: inputs refused before the start, and the announcement of the run."""

import hashlib
import json

import pytest

from sppo.config import load_run
from sppo.data.tokens import LOSS_MASK_FILE, META_FILE
from sppo.planning.elastic.step_planner import StepPlanner, step_planner
from sppo.planning.search.evaluation import evaluate_candidate
from sppo.training.input_checks import check_inputs, run_file_problems
from sppo.training.preflight import preflight
from sppo.training.trainer import StepTooLargeError
from tests.conftest import LENGTH, write_tokens
from tests.training.jobs import job_alone, records, train_alone

STARTS = (9, 30, 31, 100, 150, 400)


@pytest.fixture
def samples(work, run_file):
    """Makes runs of samples, from sections."""

    def make(**sections):
        data = {"tokens": "documents", "samples": "documents", **sections.pop("data", {})}
        train = {"samples_per_step": 4, "steps": 2, **sections.pop("train", {})}
        planning = {"ahead": False, **sections.pop("planning", {})}
        return load_run(run_file(data=data, train=train, planning=planning, **sections))

    write_tokens(work / "documents", num_tokens=8 * LENGTH, documents=STARTS)
    return make


@pytest.mark.parametrize(
    ("parallel", "rule"),
    [
        ({"pipeline_parallel_degree": 2, "multiplexed": "on"}, "multiplexed"),
        ({"pipeline_parallel_degree": 2, "schedule": "sppo_msp"}, "multiplexed"),
    ],
)
def test_refuses_what_samples_cannot_have(samples, parallel, rule):
    run = samples(parallel=parallel, model={"num_layers": 2})
    with pytest.raises(ValueError, match=rule):
        check_inputs(run)
    assert any(rule in problem.rule for problem in run_file_problems(run))


def test_a_mask_that_leaves_all_labels_out_is_refused(work, samples):
    mask = bytes(8 * LENGTH)
    (work / "documents" / LOSS_MASK_FILE).write_bytes(mask)
    meta = json.loads((work / "documents" / META_FILE).read_text())
    meta["loss_mask_sha256"] = hashlib.sha256(mask).hexdigest()
    (work / "documents" / META_FILE).write_text(json.dumps(meta))
    with pytest.raises(
        ValueError, match=r"no label counts in sample .* with a loss mask that is true"
    ):
        preflight(job_alone(samples()))


def test_the_plan_is_that_of_the_longest_sample_there_is(samples):
    run = samples(sequence={"length": 4096, "num_subsequences": 4})
    checked = preflight(job_alone(run))
    longest = 400 - 150 - 1
    assert checked.data.table.lengths.max() == longest
    assert checked.plan.boundaries[-1] == longest


def test_a_resumed_run_reads_on_where_it_ended(samples):
    """Steps of so many tokens have other numbers of samples each."""
    tokens = {"samples_per_step": None, "tokens_per_step": 300}
    length = {"length": 256, "num_subsequences": 3}
    same = {"sequence": length, "optimizer": {"schedule": "constant"}}
    whole = train_alone(samples(train={**tokens, "steps": 4, "output": "whole"}, **same))
    for steps in (1, 4):
        parts = train_alone(samples(train={**tokens, "steps": steps, "output": "parts"}, **same))
    told = [[_told(step) for step in records(outcome.output)] for outcome in (whole, parts)]
    assert told[0] == told[1]
    assert len({samples for _, samples, _, _ in told[0]}) > 1


def _told(step):
    return step["loss"], step["samples"], step["tokens"], step["program_digest"]


def test_a_step_that_does_not_fit_ends_a_run_that_is_saved(samples, monkeypatch):
    plan, planned = StepPlanner.plan, []

    def too_large(self, lengths):
        planned.append(lengths)
        if len(planned) > 1:
            raise MemoryError("too large")
        return plan(self, lengths)

    monkeypatch.setattr(StepPlanner, "plan", too_large)
    with pytest.raises(StepTooLargeError, match="step 2: too large"):
        train_alone(samples())
    monkeypatch.setattr(StepPlanner, "plan", plan)
    outcome = train_alone(samples())
    assert (outcome.first_step, outcome.done_steps) == (1, 2)


def test_a_step_of_the_longest_sample_is_the_plan_of_the_run(samples):
    """In memory and all: what holds of the plan before the start holds of such a step."""
    run = samples(sequence={"length": 4096, "num_subsequences": 4}, checkpoint={"async_save": True})
    checked = preflight(job_alone(run))
    planner = step_planner(checked.plan, background_saves=True)
    alone = planner.as_planned([planner.longest])
    evaluated = evaluate_candidate(planner.base.with_packed(alone.sequences))
    assert evaluated.candidate.lengths == checked.plan.lengths
    assert evaluated.memory == checked.plan.rank_memory
