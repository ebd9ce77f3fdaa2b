"""``sppo solve`` from a run file to its tables, its JSON, its plan and its exit codes."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache, partial
from pathlib import Path

import pytest

from sppo.cli.solution.answer import launch_commands
from sppo.config.yaml_file import format_yaml
from sppo.planning.changes import Change
from sppo.planning.plan import read_plan
from sppo.planning.search.choices import Degrees
from tests.cli.answers import answer, one_line
from tests.conftest import refuse, succeed, tree

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "configs/run/gpt_7b_512k_32gpu.yaml"

RUN = {
    "model": {"preset": "llama-3.2-1b"},
    "data": {"tokens": "there/is/no/such/directory"},
    "sequence": {"length": "128Ki"},
    "hardware": {"preset": "h100", "nodes": 1},
}
QUICK = ("model.num_layers=8",)
"""Enough to look at, in a third of the time."""
TOO_LONG = ("sequence.length=2Mi", "hardware.devices_per_node=2", "parallel.virtual_stages=1")
ONE_WAY = (
    "sequence.length=1Mi",
    "parallel.virtual_stages=1",
    "parallel.sequence_parallel_degree=8",
    "parallel.pipeline_parallel_degree=4",
    "parallel.data_parallel_degree=1",
)
"""Degrees that are given leave little to search."""
PROMISED = {"num_subsequences", "subsequence_lengths", "offload_ratios", "schedule", "predicted"}
PREDICTED = {"step_s", "tokens_per_s_per_gpu", "mfu", "bubble_fraction", "device_peak_bytes"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run file in the working directory, whose data does not exist."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(format_yaml(RUN))
    return "run.yaml"


report = partial(answer, "solve")


@cache
def example(*words):
    """The report on the example, which takes a second."""
    return report(EXAMPLE, *words)


@cache
def example_text(*words):
    """The same for people, without line breaks."""
    return one_line(succeed("solve", EXAMPLE, *words))


def test_json_has_the_promised_keys(run):
    found = report(run, *QUICK)
    assert found["feasible"] is True
    assert found["best"].keys() >= PROMISED
    assert found["best"]["predicted"].keys() >= PREDICTED
    assert found["candidates"][0] == found["best"]
    assert 2 <= len(found["candidates"]) <= 4
    assert all(candidate.keys() >= PROMISED for candidate in found["candidates"])
    assert all(rejection["reason"] for rejection in found["rejected"])
    assert len(found["by_num_subsequences"]) >= 4


def test_the_table_is_enough_to_decide_from(run):
    text = succeed("solve", run, *QUICK)
    shown = one_line(text)
    assert "llama-3.2-1b (749.2M parameters), 1 sequence of 128Ki tokens a step, bf16" in shown
    assert "on h100, 8 devices (rates analytic)" in shown
    for row in ("sequence parallel", "schedule", "policy", "step", "bubble", "host peak"):
        assert f"\n {row} " in text
    assert not re.search(r"\n (devices used|K/V placement) ", text), "as usual everywhere"
    assert "best next 1 next 2 next 3" in shown
    assert "simulated" in shown
    assert "every saved tensor stays on the device until its backward" in shown
    assert "MFU: causal model FLOPs, nothing recomputed" in shown
    assert "its budget is 73.6 GiB" in shown
    assert "dK and dV" in shown


def test_offload_ratios_and_host_memory_are_shown():
    text = example_text(*ONE_WAY)
    assert "is offloaded to host memory" in text
    assert re.search(r"offload ratio 0\.00 … 0\.\d\d ", text)
    assert "activations in host memory" in text
    found = example(*ONE_WAY)
    ratios = found["best"]["offload_ratios"]
    assert len(ratios) == found["best"]["num_subsequences"]
    assert ratios[-1] == 0 < max(ratios) <= 1
    assert found["best"]["predicted"]["host_peak_bytes"] > 0


def test_the_effective_time_is_shown():
    found = example(*ONE_WAY)["effective_time"]
    assert sum(found["shares"].values()) == pytest.approx(1)
    shown = example_text(*ONE_WAY)
    assert f"effective training time: {found['shares']['effective']:.1%}; saving takes" in shown
    assert "15m00s each)" in shown
    assert "30.00 s each)" in example_text(*ONE_WAY, "--restart-s", "30")


def test_rejections_are_grouped_for_people_and_listed_for_programs():
    text = example_text("parallel.virtual_stages=1")
    assert "11 other ways do not work (--json lists them):" in text
    assert "11 × short of device memory, most of it dK and dV e.g. SP 8 · PP 2 · DP 1" in text
    rejected = example("parallel.virtual_stages=1")["rejected"]
    assert len(rejected) == 11
    for rejection in rejected:
        shortfall = rejection["shortfall"]
        assert shortfall["bucket"] == "kv_gradients"
        assert shortfall["short_bytes"] > 0
        assert f"rank {shortfall['rank']} needs" in rejection["reason"]


def test_degrees_that_cannot_work_are_said(run):
    words = (run, *QUICK, "model.num_layers=4", "parallel.sequence_parallel_degree=1")
    reasons = [rejection["reason"] for rejection in report(*words)["rejected"]]
    every_stage = "every stage needs a layer, and the model has 4; use at most that many"
    assert reasons == [f"parallel.pipeline_parallel_degree 8: {every_stage}"]
    text = one_line(succeed("solve", *words))
    assert (
        "1 other way does not work (--json lists it): 1 × SP 1 · PP 8 · DP 1: parallel.pipeline"
        in text
    )


@pytest.fixture
def advice(monkeypatch):
    """What is told to change where nothing fits; the search for it takes seconds."""
    found = [Change("sequence.length=8Ki", "fits")]
    monkeypatch.setattr("sppo.planning.why_nothing_fits.what_would_fit", lambda run, **_: found)
    return found


def test_an_auto_machine_is_this_one(run):
    Path("here.yaml").write_text(format_yaml({**RUN, "hardware": "auto"}))
    words = ("model.preset=tiny", "sequence.length=16Ki")
    assert report("here.yaml", *words)["hardware"]["name"]
    found = report("here.yaml", *words, "hardware.preset=laptop-cpu")
    assert found["hardware"]["name"] == "laptop-cpu"
    assert "disk peak" in succeed("solve", "here.yaml", *words, "hardware.preset=laptop-cpu")


@pytest.mark.exhaustive
def test_the_example_of_a_hardware_file():
    """A file with the figures of the preset gives what the preset gives."""
    file = ROOT / "configs/hardware/a100_80g_4x8.json"
    hardware = f"hardware={{file: {file}}}"
    found = report(EXAMPLE, *ONE_WAY, hardware)
    assert found["hardware"]["name"] == "4 x 8 A100-80GB"
    assert found["best"]["predicted"] == example(*ONE_WAY)["best"]["predicted"]


def test_a_plan_is_written_read_and_simulated(run):
    words = (run, *QUICK, "-o", "plan.json", "parallel.pipeline_parallel_degree=4")
    text = succeed("solve", *words)
    assert "written plan.json: sppo simulate plan.json" in text
    plan = read_plan(Path("plan.json"))
    said = report(*words)
    found = said["best"]
    assert said["plan"] == "plan.json"
    assert plan.pipeline_parallel_degree == 4
    assert list(plan.lengths) == found["subsequence_lengths"]
    assert plan.predicted.step_s == found["predicted"]["step_s"]
    assert sorted(tree(Path())) == ["plan.json", "run.yaml"]
    numbers = json.loads(succeed("simulate", "plan.json", "--json"))
    assert numbers["makespan_s"] == pytest.approx(plan.predicted.step_s)
    assert numbers["bubble_fraction"] == pytest.approx(plan.predicted.bubble_fraction)
    assert numbers["schedule"] == plan.schedule
    assert max(numbers["device_peak_bytes"]) == found["predicted"]["device_peak_bytes"]
    assert max(numbers["saved_peak_bytes"]) < max(numbers["device_peak_bytes"])


@pytest.mark.parametrize(
    "words",
    [(), ("data.samples=documents", "train.samples_per_step=2")],
    ids=["stream", "documents"],
)
def test_the_launch_command_can_be_followed(work, words):
    words = ("run.yaml", *words, "sequence.length=32", "-o", "my plan.json")
    (launch,) = json.loads(succeed("solve", *words, "--json"))["launch"]
    text = succeed("solve", *words)
    assert f"launch: {launch}\n" in text
    assert text.splitlines()[-1].endswith(launch)
    program, *typed = shlex.split(launch)
    assert program == "sppo"
    assert "step 1/1" in succeed(*typed, "train.steps=1")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("no/plan.json", "-o no/plan.json: there is no directory no"),
        ("plan.txt", "-o plan.txt: a plan is written as JSON; end the name in .json"),
    ],
)
def test_an_output_that_cannot_be_written_is_found_before_solving(run, output, message):
    before = tree(Path())
    # Nothing fits either, which would be exit code 3.
    assert message in refuse("solve", run, *TOO_LONG, "-o", output)
    assert tree(Path()) == before


def test_what_does_not_fit_ends_with_3_on_one_screen(run, advice):
    Path("plan.json").write_text("old")
    text = one_line(refuse("solve", run, *TOO_LONG, "-o", "plan.json", code=3))
    assert "nothing fits: llama-3.2-1b (1.2B parameters), 1 sequence of 2Mi tokens" in text
    assert "nearest: SP" in text
    assert re.search(r" rank \d+ needs \S+ GiB of device memory and .*: short by ", text)
    assert "dK and dV" in text
    assert "what would fit: sequence.length=8Ki fits" in text
    assert "of these nodes alone do not make it fit" in text
    assert Path("plan.json").read_text() == "old"
    advice[:] = [Change("hardware.nodes=4", "fits")]
    assert "of these nodes alone" not in one_line(refuse("solve", run, *TOO_LONG, code=3))
    found = report(run, *TOO_LONG, code=3)
    assert found["feasible"] is False
    assert found["best"] is None
    assert found["candidates"] == []
    nearest = found["nearest"]
    short = [rejection["shortfall"]["short_bytes"] for rejection in found["rejected"]]
    assert nearest["shortfall"]["short_bytes"] == min(short) > 0
    assert {"place", "rank", "bucket", "bucket_bytes"} <= nearest["shortfall"].keys()
    assert [change["change"] for change in found["advice"]] == ["hardware.nodes=4"]


def test_heads_that_cannot_be_shared_out(run):
    words = (run, "parallel.sequence_parallel_degree=3", "hardware.devices_per_node=3")
    text = one_line(refuse("solve", *words, code=3))
    assert "error: no way to divide the devices works" in text
    assert "32 query heads cannot be sharded evenly; use a divisor of 32" in text
    assert "of these nodes alone do not make it fit" not in text
    found = report(*words, code=3)
    assert found["nearest"] is None
    assert "leave out parallel.sequence_parallel_degree" in found["advice"][0]["change"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.sequence_parallel_degree=16"], "needs 16 devices, and h100 has 8"),
        (["sequence.length=1Ki", "sequence.num_subsequences=2000"], "than the 1024 tokens"),
        ([*QUICK, "activations.policy=sppo", "hardware.file=bare.json"], "no tier to offload to"),
    ],
)
def test_a_wrong_request_ends_with_2(run, words, message):
    from dataclasses import asdict, replace

    from sppo.hardware.presets import PRESETS

    laptop = PRESETS["laptop-cpu"]
    bare = replace(laptop, node=replace(laptop.node, disk_bytes=0))
    Path("bare.json").write_text(json.dumps(asdict(bare)))
    if any("hardware.file" in word for word in words):
        Path(run).write_text(format_yaml({**RUN, "hardware": {}}))
    assert message in one_line(refuse("solve", run, *words))


@pytest.mark.parametrize(
    ("degrees", "launched"),
    [
        ((2, 1, 4), ["sppo train RUN.yaml --plan plan.json"]),
        (
            (1, 4, 8),
            ["torchrun --nnodes 4 --nproc-per-node 8 ", "srun --nodes 4 --ntasks-per-node 8 "],
        ),
        (
            (1, 3, 16),
            ["torchrun --nnodes 6 --nproc-per-node 8 ", "srun --nodes 6 --ntasks-per-node 8 "],
        ),
    ],
)
def test_the_launch_commands_are_those_of_the_degrees(degrees, launched):
    commands = launch_commands(
        Degrees(*degrees), devices_per_node=8, train="sppo train RUN.yaml --plan plan.json"
    )
    for command, start in zip(commands, launched, strict=True):
        assert command.startswith(start)
    assert all(command.endswith("sppo train RUN.yaml --plan plan.json") for command in commands)
