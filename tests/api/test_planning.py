"""Planning through ``import sppo``: the same answers as the command line, plans as files."""

import json
from pathlib import Path

import pytest

import sppo
from sppo.config import run_sections
from sppo.planning.changes import Change
from sppo.training.preflight import preflight
from tests.conftest import succeed, write_tokens
from tests.training.jobs import job_beside

RUN = {
    "model": {"preset": "tiny"},
    "data": {"tokens": "data"},
    "sequence": {"length": "16Ki"},
    "parallel": {"pipeline_parallel_degree": 2},
    "hardware": {"preset": "laptop-cpu", "nodes": 2},
}

EVEN = {"model.num_layers": 2, "train.sequences_per_step": 2}


def write(path, sections):
    path.write_text(json.dumps(sections))
    return path


def test_solve_is_the_command(tmp_path):
    file = write(tmp_path / "run.yaml", RUN)
    succeed("solve", file, "-o", tmp_path / "plan.json")
    plan = sppo.solve(sppo.load_run(file))
    assert plan == sppo.load_plan(tmp_path / "plan.json")
    sppo.save_plan(plan, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()


def test_a_run_may_be_what_load_run_reads(tmp_path):
    file = write(tmp_path / "run.yaml", RUN)
    assert sppo.solve(RUN) == sppo.solve(str(file)) == sppo.solve(sppo.load_run(file))
    for function in (sppo.solve, sppo.estimate, sppo.simulate, sppo.train, sppo.evaluate):
        with pytest.raises(TypeError, match="a run of 5: give the path of a run file"):
            function(5)


@pytest.mark.parametrize("degree", ["pipeline_parallel_degree", "data_parallel_degree"])
def test_a_run_of_two_ranks_on_this_machine_is_simulated_as_training_plans_it(work, degree):
    run = sppo.load_run(work / "run.yaml", {f"parallel.{degree}": 2, **EVEN})
    planned = preflight(job_beside(run, local_ranks=2)).plan
    assert sppo.simulate(run).schedule.digest() == planned.program_digest
    assert sppo.simulate(run).makespan_s == sppo.simulate(planned).makespan_s


def test_what_does_not_fit_says_what_would(tmp_path, monkeypatch):
    found = [Change("sequence.length=8Ki", "fits")]
    monkeypatch.setattr("sppo.planning.why_nothing_fits.what_would_fit", lambda run, **_: found)
    sections = {
        **RUN,
        "model": {"preset": "llama-3.2-1b"},
        "parallel": {"virtual_stages": 1},
        "sequence": {"length": "2Mi"},
        "hardware": {"preset": "h100", "nodes": 1, "devices_per_node": 2},
    }
    file = write(tmp_path / "run.yaml", sections)
    with pytest.raises(sppo.NothingFitsError, match=r"(?s)short by .*what would fit:") as caught:
        sppo.solve(sppo.load_run(file))
    assert isinstance(caught.value, MemoryError)
    assert list(caught.value.changes) == found


def test_samples_are_planned_as_a_step_of_the_longest(tmp_path):
    sections = {
        **RUN,
        "data": {"tokens": "data", "samples": "documents"},
        "train": {"samples_per_step": 4},
    }
    file = write(tmp_path / "run.yaml", sections)
    succeed("solve", file, "--lengths", "magi", "-o", tmp_path / "plan.json")
    run = sppo.load_run(file)
    assert sppo.solve(run, lengths="magi") == sppo.load_plan(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="data.tokens data: not there"):
        sppo.solve(run)


def test_samples_get_the_same_degrees_from_every_command(tmp_path):
    """Those of drawn steps: many short samples suit replicas, a longest sample alone does not."""
    write_tokens(tmp_path / "data", num_tokens=2000, documents=range(50, 2000, 50))
    sections = {
        "model": {"preset": "tiny-test"},
        "data": {"tokens": str(tmp_path / "data"), "samples": "documents"},
        "sequence": {"length": 64},
        "train": {"samples_per_step": 16},
        "hardware": {"preset": "laptop-cpu", "nodes": 2},
    }
    run = sppo.load_run(sections)
    plan = sppo.solve(run)
    assert plan.data_parallel_degree == 2
    assert sppo.estimate(run).evaluated.degrees.data_parallel == 2
    assert len(sppo.simulate(run).ranks) == 1
    del sections["data"]["tokens"]
    without = sppo.load_run(sections, {"data.tokens": "none"})
    assert sppo.estimate(without).evaluated.degrees.data_parallel == 1


def test_a_run_goes_through_its_sections():
    """What was left out is still left out: the solver may choose it."""
    for file in sorted(Path("configs/run").glob("*.yaml")):
        run = sppo.load_run(file)
        again = sppo.load_run(run_sections(run))
        assert again == run
        assert again.parallel.model_fields_set == run.parallel.model_fields_set
        assert again.sequence.model_fields_set == run.sequence.model_fields_set
        assert json.loads(json.dumps(run_sections(run))) == run_sections(run)
