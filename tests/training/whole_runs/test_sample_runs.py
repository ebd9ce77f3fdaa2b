"""Runs of samples on other grids of ranks: the samples, losses and weights of one rank."""

import json
import shutil

import numpy as np
import pytest

from tests.conftest import LENGTH, write_run, write_tokens
from tests.tiers import default_of
from tests.training.whole_runs.test_parallel_runs import (
    MODEL,
    OPTIMIZER,
    alone,
    assert_like_alone,
    overrides,
    run_on,
)

STEPS = 3
LENGTHS = (2, 40, 3, 65, 5, 130, 2, 2, 33, 17, 64, 9, 90, 4)
"""Tokens of the documents, of which a sample has one less; what is longer than LENGTH is cut."""
SHAPES = [(1, 2, 1), (1, 3, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1), (1, 2, 2)]
SPEEDS = {"by tokens": {"tokens_per_step": 3 * LENGTH}, "by samples": {"samples_per_step": 6}}


def write_samples(directory, train, *, ahead=False):
    """Token data, and a run file for more than an epoch of its samples."""
    ends = np.cumsum(LENGTHS).tolist()
    write_tokens(directory / "tokens", num_tokens=ends[-1], documents=ends[:-1])
    write_run(
        directory / "run.yaml",
        model=MODEL,
        data={"samples": "documents", "shuffle": True},
        optimizer=OPTIMIZER,
        planning={"ahead": ahead},
        train={"steps": STEPS, "dtype": "fp32", "output": "alone", **train},
    )


@pytest.fixture(scope="module", params=default_of(SPEEDS, "by tokens"))
def done_alone(tmp_path_factory, request):
    """A directory with the run of one rank that the others are compared with."""
    directory = tmp_path_factory.mktemp("samples")
    write_samples(directory, SPEEDS[request.param])
    alone(directory, overrides((1, 1, 1), STEPS))
    return directory


@pytest.fixture
def job(work, done_alone):
    shutil.copy(done_alone / "run.yaml", work)
    shutil.copytree(done_alone / "alone", work / "alone")
    shutil.copytree(done_alone / "tokens", work / "tokens", dirs_exist_ok=True)
    return work


def counted(directory):
    """What was trained on in each step: samples, and labels that counted."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [(record["samples"], record["labels"]) for record in map(json.loads, lines)]


def assert_same_run(directory, output):
    assert counted(directory / output) == counted(directory / "alone")
    assert_like_alone(directory, output)


def test_the_run_is_longer_than_an_epoch(done_alone):
    steps = counted(done_alone / "alone")
    assert len(steps) == STEPS
    assert len({labels for _, labels in steps}) > 1
    assert sum(samples for samples, _ in steps) > len(LENGTHS)


def test_a_run_goes_on_with_other_degrees(ranks, job):
    run_on(ranks, job, (2, 2, 1), 1, "moving")
    run_on(ranks, job, (1, 1, 2), 2, "moving")
    alone(job, overrides((1, 1, 1), STEPS, **{"train.output": "moving"}))
    assert_same_run(job, "moving")
