"""Runs of a mixture: the samples of one process, on any degrees, resumed after any step."""

import itertools
import shutil

import numpy as np
import pytest

from tests.conftest import LENGTH, write_run, write_tokens
from tests.tiers import default_of
from tests.training.whole_runs.test_parallel_runs import (
    MODEL,
    ONE,
    OPTIMIZER,
    alone,
    assert_like_alone,
    counted,
    overrides,
    run_on,
)

STEPS = 5
DOCUMENTS = {"books": (60, 70, 90, 64, 130), "chat": (5, 6, 9, 2, 11), "code": (20, 31, 9, 40)}
WEIGHTS = {"books": 60, "chat": 10, "code": 30}
KINDS = {
    "stream": {"train": {"sequences_per_step": 4}},
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "shape"), itertools.product(KINDS, DEGREES))
def test_any_degrees_read_what_one_process_reads(ranks, tmp_path, reference, kind, shape):
    job = shutil.copytree(reference(kind), tmp_path / "job")
    run_on(ranks, job, shape, STEPS, "other")
    assert_like_alone(job, "other")
    assert counted(job / "other") == counted(job / "alone")


@pytest.mark.parametrize("kind", default_of(KINDS, "stream", "documents by tokens"))
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
    assert counted(job / "other") == counted(job / "alone")
