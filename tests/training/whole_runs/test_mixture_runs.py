"""Runs of a mixture: the samples of one process, on any degrees, resumed after any step."""

import itertools
import shutil

import numpy as np
import pytest

from sppo.config import load_run
from tests.conftest import LENGTH, write_run, write_tokens
from tests.tiers import default_of
from tests.training.jobs import evaluate_initial, records, train_alone
from tests.training.whole_runs.test_parallel_runs import (
    MODEL,
    ONE,
    OPTIMIZER,
    alone,
    assert_like_alone,
    overrides,
    run_on,
)

STEPS = 5
DOCUMENTS = {"books": (60, 70, 90, 64, 130), "chat": (5, 6, 9, 2, 11), "code": (20, 31, 9, 40)}
WEIGHTS = {"books": 60, "chat": 10, "code": 30}
KINDS = {
    "stream": {"data": {"isolate_documents": True}, "train": {"sequences_per_step": 4}},
    "documents": {"data": {"samples": "documents"}, "train": {"samples_per_step": 4}},
    "documents by tokens": {
        "data": {"samples": "documents", "weights": "samples"},
        "train": {"tokens_per_step": 4 * LENGTH},
    },
}
DEGREES = ((2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2))


def write_sources(directory):
    """Token data of three sources; their entries in a run file."""
    for seed, (name, lengths) in enumerate(DOCUMENTS.items()):
        ends = np.cumsum(lengths).tolist()
        write_tokens(directory / name, num_tokens=ends[-1] + LENGTH, documents=ends, seed=seed)
    return {
        name: {"tokens": name, "weight": weight, "max_epochs": 99}
        for name, weight in WEIGHTS.items()
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Function that returns the directory of a run of one process, of a kind of samples."""
    made = {}

    def directory(kind):
        if kind not in made:
            made[kind] = found = tmp_path_factory.mktemp("mixture")
            data = {"tokens": None, "sources": write_sources(found), "shuffle": True}
            train = {"steps": STEPS, "output": "alone", **KINDS[kind]["train"]}
            write_run(
                found / "run.yaml",
                model=MODEL,
                optimizer=OPTIMIZER,
                data={**data, **KINDS[kind].get("data", {})},
                train=train,
                planning={"ahead": False},
            )
            alone(found, overrides(ONE, STEPS))
        return made[kind]

    return directory


def assert_same_sources(directory):
    """Every step trained on the same of each source, as one process did, with equal losses."""
    ours, theirs = (records(directory / output) for output in ("other", "alone"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["sources"].keys() == other["sources"].keys()
        for name, expected in other["sources"].items():
            figures = mine["sources"][name]
            for count in ("tokens", "labels"):
                assert figures[count] == expected[count], (name, count)
            if expected["labels"]:
                assert figures["loss"] == pytest.approx(expected["loss"], rel=2e-6)
            else:
                assert figures["loss"] is expected["loss"] is None


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "shape"), list(itertools.product(KINDS, DEGREES)))
def test_any_degrees_read_what_one_process_reads(ranks, tmp_path, reference, kind, shape):
    job = shutil.copytree(reference(kind), tmp_path / "job")
    run_on(ranks, job, shape, STEPS, "other")
    assert_like_alone(job, "other")
    assert_same_sources(job)


@pytest.mark.parametrize("kind", default_of(KINDS, "documents by tokens"))
def test_a_run_that_ends_after_every_step_goes_on_with_other_degrees(
    ranks, tmp_path, reference, kind
):
    job = shutil.copytree(reference(kind), tmp_path / "job")
    for steps, shape in enumerate([ONE, *DEGREES], start=1):
        if shape == ONE:
            alone(job, overrides(ONE, steps, **{"train.output": "other"}))
        else:
            run_on(ranks, job, shape, steps, "other")
    assert_like_alone(job, "other")
    assert_same_sources(job)


@pytest.mark.parametrize("kind", default_of(KINDS, "documents by tokens"))
def test_losses_of_sources_add_up_to_the_loss_of_the_step(reference, kind):
    for step in records(reference(kind) / "alone"):
        sources = step["sources"].values()
        assert sum(source["tokens"] for source in sources) == step["tokens"]
        assert sum(source["labels"] for source in sources) == step["labels"]
        total = sum(source["loss"] * source["labels"] for source in sources if source["labels"])
        assert total == pytest.approx(step["loss"] * step["labels"], rel=1e-9)
        assert all((source["loss"] is None) == (source["labels"] == 0) for source in sources)


def test_the_loss_of_a_source_is_that_of_an_evaluation_of_it(tmp_path, monkeypatch):
    """With weights that stay, over a block of draws that is whole epochs of both sources."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        starts = range(3, 3 + 3 * seed + 9, 3 + seed)[:3]
        write_tokens(tmp_path / name, num_tokens=20, documents=starts, seed=seed)
    sources = {name: {"tokens": name, "weight": 1, "max_epochs": 999} for name in "ab"}
    path = write_run(
        tmp_path / "run.yaml",
        data={"tokens": None, "sources": sources, "samples": "documents", "weights": "samples"},
        optimizer={"lr": 0},
        train={"samples_per_step": 512, "steps": 2},
        planning={"ahead": False},
    )
    steps = records(train_alone(load_run(path)).output)
    for name in "ab":
        found = evaluate_initial(load_run(path, {"data.eval_tokens": name}))
        own = [step["sources"][name] for step in steps]
        labels = sum(source["labels"] for source in own)
        loss = sum(source["loss"] * source["labels"] for source in own) / labels
        assert labels == 128 * found.num_tokens
        assert loss == pytest.approx(found.loss, rel=1e-6)


def test_a_run_of_one_data_set_has_no_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens")
    outcome = train_alone(load_run(write_run(tmp_path / "run.yaml", train={"steps": 1})))
    assert records(outcome.output)[0]["sources"] is None
