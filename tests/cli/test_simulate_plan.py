"""``sppo simulate plan.json``: simulation of a solver's plan, and refused requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sppo.config.yaml_file import format_yaml
from tests.conftest import refuse, succeed

RUN = {
    "model": {"preset": "llama-3.2-1b"},
    "data": {"tokens": "there/is/no/such/directory"},
    "sequence": {"length": "64Ki"},
    "parallel": {"pipeline_parallel_degree": 4},
    "hardware": {"preset": "h100", "nodes": 1},
}


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("solved")
    (directory / "run.yaml").write_text(format_yaml(RUN))
    succeed("solve", directory / "run.yaml", "parallel.schedule=sppo", "-o", directory / "p.json")
    return (directory / "p.json").read_text()


@pytest.fixture
def plan(plan_text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(plan_text)
    return json.loads(plan_text)


def report(*words):
    return json.loads(succeed("simulate", "plan.json", *words, "--json"))


def one_line(text):
    return " ".join(text.split())


def test_values_of_the_rank_table_stay_on_one_line(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = succeed("simulate", "plan.json").splitlines()
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert all(row[-1] in {"GiB", "MiB"} for row in rows)
    assert not any("…" in line for line in lines)


def test_the_simulation_is_the_prediction(plan):
    numbers = report()
    assert numbers["makespan_s"] == pytest.approx(plan["predicted"]["step_s"])
    assert numbers["num_units"] == len(plan["boundaries"]) - 1
    assert numbers["num_ranks"] == 4
    assert numbers["schedule"] == "sppo"
    assert numbers["hardware"] == "h100 (analytic)"
    assert 0 < numbers["forward_makespan_s"] < numbers["makespan_s"]
    assert "costs of h100 (analytic)" in succeed("simulate", "plan.json")


def test_other_schedules_with_the_same_placement(plan):
    numbers = report("--compare", "seq1f1b", "sppo_msp")
    assert [other["schedule"] for other in numbers["compare"]] == ["seq1f1b", "sppo_msp"]
    assert numbers["compare"][1]["makespan_s"] <= numbers["makespan_s"]


def test_its_forward_alone(plan):
    alone = report("--forward-only")
    assert alone["makespan_s"] == pytest.approx(report()["forward_makespan_s"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sequence.length=32Ki"], "'sequence.length=32Ki': a plan has fixed it"),
        (["ranks=2"], "'ranks=2' belongs to an abstract case, but plan.json has costs of a"),
        (["--compare", "1f1b"], "use seq1f1b"),
        (["--compare", "x"], "--compare 'x': not one of gpipe, 1f1b"),
        (["other.json"], "two files, plan.json and other.json"),
    ],
)
def test_what_a_plan_has_fixed_cannot_be_asked_for(plan, words, message):
    assert message in one_line(refuse("simulate", "plan.json", *words))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "plan.json: not JSON"),
        (lambda text: json.dumps({**json.loads(text), "version": 99}), "has version 99"),
    ],
)
def test_a_damaged_plan_is_one_clear_error(plan, plan_text, change, message):
    Path("plan.json").write_text(change(plan_text))
    error = refuse("simulate", "plan.json")
    assert message in one_line(error)
    assert "plan.json" in error
    assert "sppo solve" in error or "make it again" in error
