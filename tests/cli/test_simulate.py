"""``sppo simulate`` from its words to its output and its exit codes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.cli.answers import answer, one_line
from tests.conftest import call, refuse, succeed

SHAPE = ("ranks=4", "sequences=1", "subsequences=8")
CASE = ("schedule=sppo", *SHAPE)


report = partial(answer, "simulate")


def test_json_has_the_promised_keys_and_numbers():
    numbers = report(*CASE)
    assert numbers["makespan_s"] == 33
    assert numbers["forward_makespan_s"] == 11
    assert numbers["bubble_fraction"] == pytest.approx(9 / 33)
    assert numbers["peak_in_flight"] == [8, 8, 8, 8]
    assert numbers["idle_s"] == [9, 9, 9, 9]
    assert numbers["device_peak_bytes"] == [8, 8, 8, 8]
    assert numbers["exposed_copy_s"] == [0, 0, 0, 0]
    assert numbers["provenance"] == "simulated"


def test_keys_of_costs():
    shape = ("schedule=1f1b", "ranks=2", "sequences=4", "subsequences=1")
    assert report(*shape, "latency=1")["makespan_s"] == 19
    zero_bubble = ("schedule=zb_h1", "ranks=4", "sequences=8", "subsequences=1")
    assert report(*zero_bubble, "backward=1", "weight=1")["makespan_s"] == 27
    uneven = ("schedule=sppo", "ranks=3", "sequences=1", "subsequences=3")
    assert report(*uneven, "unit_costs=1,2,1")["makespan_s"] == 24
    assert report(*CASE, "forward=2", "backward=4")["makespan_s"] == 66


def test_schedules_are_compared():
    words = (*CASE, "--compare", "gpipe", "--compare", "sppo_msp")
    numbers = report(*words)
    assert [(n["schedule"], round(n["makespan_s"], 6)) for n in numbers["compare"]] == [
        ("gpipe", 33),
        ("sppo_msp", 25),
    ]
    assert "0.76x" in succeed("simulate", *words)


def test_the_table_is_for_people():
    text = succeed("simulate", *CASE)
    assert "sppo: 4 ranks, 4 stages, 1 sequence, 8 units (simulated)" in text
    assert "step 33 · forward alone 11 · idle 27.3%" in text
    many = succeed("simulate", *CASE, "ranks=20", "subsequences=2")
    assert "and 4 more ranks; --json lists all of them" in many


def test_plots_are_written(tmp_path):
    png, trace = tmp_path / "t.png", tmp_path / "t.json"
    text = succeed("simulate", *CASE, "--png", png, "--trace", trace)
    assert text.endswith(f"written {png}\nwritten {trace}\n")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_a_program_can_be_written_edited_and_simulated(tmp_path):
    file = tmp_path / "program.txt"
    shape = ("schedule=sppo", "ranks=2", "sequences=1", "subsequences=4")
    succeed("simulate", *shape, "--write-program", file)
    numbers = report("--program", file)
    assert numbers["makespan_s"] == 15
    assert numbers["forward_makespan_s"] == 5
    assert report("--program", file, "latency=1", "backward=1")["makespan_s"] == 12
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("1F0.1", "1F0.2", 1), encoding="utf-8")
    error = refuse("simulate", "--program", file)
    assert "program.txt, line 5: rank 1" in error
    assert "1F0.2 is there more than once (rule: coverage)" in error


def test_a_program_with_copies_is_offloaded(tmp_path):
    file = tmp_path / "program.txt"
    shape = ("schedule=sppo", "ranks=1", "sequences=1", "subsequences=4")
    succeed("simulate", *shape, "offload_ratio=1,1,1,0", "--write-program", file)
    assert report("--program", file)["device_peak_bytes"] == [2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to simulate: give RUN.yaml or plan.json, or schedule=NAME"),
        (["schedule=1f1b", *SHAPE], "use seq1f1b, or 1 subsequence"),
        ([*CASE, "unit_costs=1,2,3"], "3 unit costs for 8 units"),
        ([*CASE, "virtual=2"], "use one of interleaved_1f1b"),
        ([*CASE, "ranks=1000000", "subsequences=9"], "1 problem 1000000 stages x 1 sequences x"),
        ([*CASE, "seq1f"], "'seq1f' is neither a run file"),
        ([*CASE, "--compare", "x"], "--compare 'x': not one of"),
        ([*CASE, "a.b=1"], "'a.b=1' changes a run file, but none is given"),
        (["a.yaml", "b.yaml"], "two files, a.yaml and b.yaml"),
        (["plan.json"], "plan.json: No such file"),
        (["missing.yaml"], "missing.yaml"),
        (["run.yaml", "latency=1"], "'latency=1' belongs to an abstract case, but run.yaml has"),
        (["schedule=sppo", "run.yaml"], "the key of a run file is parallel.schedule or"),
        (["--program", "missing.txt"], "missing.txt: No such file"),
        (["--program", "p.txt", "ranks=2"], "ranks 2 unknown key"),
        (["--program", "p.txt", "--compare", "gpipe"], "simulates the file alone"),
    ],
)
def test_a_wrong_request_ends_with_2_and_says_what_to_write(words, message):
    assert message in " ".join(refuse("simulate", *words).split())


def test_all_problems_of_an_abstract_case_are_listed_as_those_of_a_run_file():
    wrong = {
        "schedule=zbv": "'zbv' not one of gpipe, 1f1b",
        "ranks=0": "0 must be greater than or equal to 1",
        "forward=-1": "-1 must be greater than or equal to 0",
        "h2d=nan": "'nan' must be a finite number",
        "virtual=x": "'x' must be a valid integer",
        "bandwidth=0": "0 neither unlimited nor valid: must be greater than 0",
        "unit_costs=1,x": "'x' must be a valid number",
        "offload_ratio=1.5": "1.5 neither none, full, adaptive nor numbers within 0 and 1",
        "bandwith=1": "1 unknown key. Did you mean 'bandwidth'?",
    }
    lines = [" ".join(line.split()) for line in refuse("simulate", *wrong).splitlines()]
    assert "the request has 11 problems" in lines[0]
    assert any(line == "sequences (missing) required" for line in lines)
    for word, message in wrong.items():
        key = word.partition("=")[0]
        assert any(line.startswith(f"{key} ") and message in line for line in lines), word


def test_a_key_that_is_written_as_an_option_is_explained():
    text = " ".join(call("simulate", "--unit-costs", "1").stderr.replace("│", " ").split())
    assert "No such option: --unit-costs; a key is written unit_costs=VALUE" in text


def test_help_lists_the_keys():
    text = " ".join(succeed("simulate", "--help").split())
    assert "schedule required One of gpipe, 1f1b" in text
    assert "backward 2 Time of one B, without W." in text


AXES = ("data", "pipeline", "sequence")
RUN = """
model: {preset: llama-3.2-1b}
data: {tokens: data}
sequence: {length: 64Ki, num_subsequences: 8}
hardware: {preset: a100-80g, nodes: 1}
"""


def test_a_run_file_with_the_costs_of_a_machine(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN, encoding="utf-8")
    alone = report(file, *(f"parallel.{name}_parallel_degree=1" for name in AXES))
    assert alone["num_ranks"] == 1
    assert alone["chosen_by_solve"] == []
    assert 0 < alone["bubble_fraction"] < 0.01  # the optimizer's step, in which no unit computes
    assert alone["hardware"] == "a100-80g (analytic)"
    degrees = [f"parallel.{name}_parallel_degree=1" for name in ("data", "sequence")]
    degrees.append("parallel.pipeline_parallel_degree=4")
    four = report(
        file, *degrees, "parallel.schedule=sppo", "--compare", "sppo_msp", "--compare", "1f1b"
    )
    assert four["num_units"] == 8
    assert alone["makespan_s"] / 4 < four["makespan_s"] < alone["makespan_s"]
    msp, whole = four["compare"]
    assert msp["makespan_s"] <= four["makespan_s"]
    assert whole["num_units"] == 1
    left_out = report(file)
    assert left_out["num_devices"] == 8
    assert "parallel.sequence_parallel_degree" in left_out["chosen_by_solve"]
    assert left_out["makespan_s"] < alone["makespan_s"] / 4
    longer = report(file, "sequence.length=128Ki")
    assert longer["makespan_s"] > 2 * left_out["makespan_s"]
    text = succeed("simulate", file)
    assert "costs of a100-80g (analytic)" in text
    assert "chosen by solve: parallel.data_parallel_degree" in text


# A plan


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("solved")
    (directory / "run.yaml").write_text(RUN)
    words = ("parallel.pipeline_parallel_degree=4", "parallel.schedule=sppo")
    succeed("solve", directory / "run.yaml", *words, "-o", directory / "plan.json")
    return (directory / "plan.json").read_text()


@pytest.fixture
def plan(plan_text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(plan_text)


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
@pytest.mark.usefixtures("plan")
def test_what_a_plan_has_fixed_cannot_be_asked_for(words, message):
    assert message in one_line(refuse("simulate", "plan.json", *words))
