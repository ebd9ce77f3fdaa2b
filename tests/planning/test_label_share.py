"""Share of labels that count: read from the loss mask, and what the head costs with it."""

import json

import numpy as np
import pytest

from sppo import estimate
from sppo.config import load_run
from sppo.cost.flops import head_flops, step_flops
from sppo.cost.layer import head_parts
from sppo.cost.stages.seconds import stage_seconds
from sppo.data.samples.label_share import with_label_share_if_there
from sppo.planning.make_plan import make_plan
from sppo.planning.plan import check_plan_fits, plan_json, read_plan
from sppo.planning.run_plan import executed_candidate
from tests.conftest import LENGTH, succeed, write_masked
from tests.planning.cases import machine, run_config

QUARTER = [True, False, False, False]


def share_of(run):
    return with_label_share_if_there(run).data.label_share


def test_the_share_of_streams_documents_and_mixtures(work, run_file):
    """The first token of a document is no label; 90 % of the mixture's tokens are masked data."""
    write_masked(work / "masked", QUARTER, num_tokens=64 * LENGTH + 1)
    starts = range(0, 40 * 20, 20)
    write_masked(work / "twenties", [True, *[False] * 17, True, True], num_tokens=800,
                 documents=[*starts][1:])  # fmt: skip
    stream = load_run(run_file(data={"tokens": "masked"}))
    assert share_of(stream) == pytest.approx(0.25, abs=1e-3)
    documents = {"tokens": "twenties", "samples": "documents"}
    assert share_of(load_run(run_file(data=documents, train={"samples_per_step": 3}))) == 0.1053
    sources = {
        "plain": {"tokens": "tokens", "weight": 10, "max_epochs": 100},
        "masked": {"tokens": "masked", "weight": 90, "max_epochs": 100},
    }
    mixed = share_of(load_run(run_file(data={"tokens": None, "sources": sources})))
    assert mixed == pytest.approx(0.1 + 0.9 * 0.25, abs=0.01)


def test_no_share_without_a_mask_or_data_and_a_written_one_stays(work, run_file):
    assert share_of(load_run(run_file())) is None
    assert share_of(load_run(run_file(data={"tokens": "nowhere"}))) is None
    write_masked(work / "masked", QUARTER)
    assert share_of(load_run(run_file(data={"tokens": "masked", "label_share": 0.5}))) == 0.5


def test_train_and_estimate_plan_with_the_share_and_solve_without_data(work, run_file):
    write_masked(work / "masked", QUARTER)
    source = run_file(data={"tokens": "masked"}, train={"steps": 2})
    assert estimate(source).run.data.label_share == pytest.approx(0.25, abs=1e-3)
    succeed("train", source)
    plan = read_plan(work / "out/plan.json")
    assert plan.candidate().workload.label_share == plan.run["data"]["label_share"]
    assert plan.run["data"]["label_share"] == pytest.approx(0.25, abs=1e-3)
    succeed("solve", source, "-o", "plan.json")
    assert "label_share" not in read_plan(work / "plan.json").run["data"]
    succeed("train", source, "--plan", "plan.json", "train.output=followed")


LENGTH_PLANNED = 65536


def run_of(**data):
    """A run of a model with a large vocabulary on four ranks of a pipeline."""
    return run_config(
        "llama-3.2-1b",
        length=LENGTH_PLANNED,
        data={"tokens": "data", **data},
        parallel={"pipeline_parallel_degree": 4},
        sequence={"num_subsequences": 8, "partition": "length"},
    )


def test_the_head_alone_is_priced_by_the_share():
    whole, all_count, some = (
        executed_candidate(run_of(**data), hardware=machine()).candidate
        for data in ({}, {"label_share": 1.0}, {"label_share": 0.25})
    )
    tokens = np.array([8192.0])
    quarter = head_parts(whole.workload, tokens=tokens / 4)
    for name, seconds in head_parts(some.workload, tokens=tokens).items():
        assert seconds == pytest.approx(quarter[name])
    times = [stage_seconds(candidate) for candidate in (whole, all_count, some)]
    assert np.array_equal(times[0].forward, times[1].forward)
    assert np.array_equal(times[0].forward[:-1], times[2].forward[:-1])
    assert np.all(times[0].forward[-1] > times[2].forward[-1])
    assert np.array_equal(times[0].backward, times[2].backward)


def test_model_flops_of_a_plan_count_labels(tmp_path):
    whole, some = (
        make_plan(run, executed_candidate(run, hardware=machine()))
        for run in (run_of(), run_of(label_share=0.25))
    )
    flops, fewer = (plan.predicted.mfu * plan.predicted.step_s for plan in (whole, some))
    every = step_flops(whole.model, length=LENGTH_PLANNED, sequences=1)
    saved = 0.75 * sum(head_flops(whole.model)) * LENGTH_PLANNED
    assert fewer / flops == pytest.approx(1 - saved / every)
    assert some.predicted.step_s < whole.predicted.step_s
    for plan, run in ((whole, run_of(label_share=0.25)), (some, run_of())):
        check_plan_fits(plan, run)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_json(some)))
    assert read_plan(path).candidate().workload.label_share == 0.25
    assert "label_share" not in plan_json(whole)["run"]["data"]
