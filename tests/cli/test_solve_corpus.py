"""``sppo solve`` with data.samples=documents: tables, JSON, plan, plot, exit codes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from sppo.config.yaml_file import format_yaml
from sppo.data.samples.length_distributions import DISTRIBUTIONS
from sppo.planning.changes import Change
from sppo.planning.plan import read_plan
from tests.cli.answers import answer
from tests.conftest import refuse, succeed, write_tokens

RUN = {
    "model": {
        "vocab_size": 4096,
        "hidden_size": 1024,
        "num_layers": 8,
        "num_heads": 8,
        "num_kv_heads": 8,
        "mlp_size": 4096,
    },
    "data": {"tokens": "none", "samples": "documents"},
    "sequence": {"length": "32Ki"},
    "train": {"samples_per_step": 24},
    "hardware": {"preset": "a100-40g", "devices_per_node": 4},
}
SMALL = ("hardware.devices_per_node=2", "activations.tier=device", "parallel.virtual_stages=1")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(format_yaml(RUN))
    return "run.yaml"


report = partial(answer, "solve")


def test_a_corpus_by_name(run):
    found = report(run, "--lengths", "github", "-o", "plan.json")
    assert found["feasible"] is True
    assert found["corpus"]["source"] == "github"
    assert [step["samples"] for step in found["corpus"]["steps"]] == [24] * 3
    best, plan = found["best"], read_plan(Path("plan.json"))
    assert best == found["candidates"][0]
    for name in ("sequence", "pipeline", "data"):
        degree = f"{name}_parallel_degree"
        assert best[degree] == getattr(plan, degree)
    tokens = sum(step["tokens"] for step in found["corpus"]["steps"])
    seconds = sum(step["step_s"] for step in best["steps"])
    assert best["tokens_per_s"] == pytest.approx(tokens / seconds)
    assert best["tokens_per_s_per_gpu"] * 4 == pytest.approx(best["tokens_per_s"])
    assert 0 <= best["bubble_fraction"] < 1
    budget = found["hardware"]["device_budget_bytes"]
    for memory in (best["memory"], best["longest_sample"]["memory"]):
        assert sum(memory["device"].values()) == pytest.approx(memory["device_bytes"])
        assert memory["device_bytes"] <= budget
    step = best["steps"][0]
    chunks = step["chunks"]
    assert chunks["split"] + chunks["batched"] + chunks["hybrid"] == chunks["count"]
    assert chunks["least_tokens"] <= chunks["median_tokens"] <= chunks["most_tokens"]
    assert found["searched"]["divisions"] >= found["searched"]["divisions_planned"] > 1


def test_the_corpus_of_the_run(run, tmp_path):
    starts = tuple(range(3000, 60000, 3000))
    write_tokens(tmp_path / "tokens", num_tokens=60000, documents=starts)
    found = report(run, "data.tokens=tokens")
    assert found["corpus"]["source"] == "tokens"
    assert {step["longest"] for step in found["corpus"]["steps"]} == {2999}


def test_the_help_names_the_distributions(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    told = " ".join(succeed("solve", "--help").split())
    assert ", ".join(DISTRIBUTIONS) in told


def test_tables_for_people(run):
    told = succeed("solve", run, "--lengths", "github", "--explain", "-o", "plan.json")
    for words in (
        "3 steps drawn from github, of 24 samples",
        "pipeline parallel",
        "ways to divide the devices",
        "memory of one device of each rank",
        "host memory of a node",
        "a step of the longest samples, of 32Ki tokens",
        "go on each rank",
        "written plan.json",
    ):
        assert words in told


def test_nothing_fits(run, monkeypatch):
    found = [Change("sequence.length=8Ki", "fits")]
    monkeypatch.setattr("sppo.planning.why_nothing_fits.what_would_fit", lambda run, **_: found)
    words = ("--lengths", "github", "sequence.length=4Mi", *SMALL)
    told = refuse("solve", run, *words, code=3)
    assert re.search(
        r"the longest sample, of 4194304 tokens, does not fit: stages? [\d, ]+(of rank \d+ )?"
        r"needs? \S+ [KMGT]iB of device memory .* short by \S+ [KMGT]iB; most of it is",
        told,
    )
    assert "what would fit" in told
    found = report(run, *words, code=3)
    assert found["feasible"] is False
    assert found["nearest"]["shortfall"]["short_bytes"] > 0
    assert [change["change"] for change in found["advice"]] == ["sequence.length=8Ki"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "data.tokens none: not there"),
        (("--lengths", "githib"), "Did you mean 'github'?"),
        (
            ("--lengths", "magi", "data.samples=stream", "train.samples_per_step=null"),
            "lengths: only of data.samples=documents",
        ),
    ],
)
def test_mistakes(run, words, said):
    assert said in refuse("solve", run, *words)
