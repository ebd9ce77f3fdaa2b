"""Runs whose ranks hold only their rows of gradients and weights (ZeRO-2 and 3)."""

import contextlib
import json
from pathlib import Path
from unittest import mock

import pytest

from sppo.config import load_run
from sppo.training import trainer
from sppo.training.preflight import preflight
from tests.tiers import each_once, exhaustive
from tests.training.jobs import job_of_rank
from tests.training.whole_runs.test_parallel_runs import MODEL, overrides, run_on


def predicted_and_measured(rank, directory, arguments):
    """(predicted, measured) bytes of weights and of gradients on one of two replicas."""
    with (
        contextlib.chdir(directory),
        mock.patch.object(trainer, "warm_up", return_value=None),
    ):
        run = load_run(Path("run.yaml"), arguments)
        job = job_of_rank(run, rank)
        checked = preflight(job)
        measured = trainer.train(job, checked).buckets
        device = checked.plan.stages[0].memory.device
        return [
            (getattr(device, name), getattr(measured, name))
            for name in ("weights_bytes", "gradients_bytes")
        ]


@pytest.mark.parametrize(("zero", "vocab_size"), each_once([1, 2, 3], [64, 4096]))
def test_measured_gradients_are_the_predicted_ones(ranks, work, run_file, zero, vocab_size):
    run_file(model={**MODEL, "vocab_size": vocab_size}, train={"steps": 1, "sequences_per_step": 2})
    arguments = overrides((2, 1, 1), 1, **{"parallel.zero": zero, "train.output": "two"})
    for answer in ranks.run(predicted_and_measured, work, arguments, ranks=2):
        for predicted, measured in answer:
            assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("zero", [3, *exhaustive(2)])
def test_steps_that_are_not_finite_are_skipped(ranks, work, run_file, zero):
    """A rate that no weights survive: gradients of NaN reach every shard, and no update."""
    more = {"parallel.zero": zero, "optimizer.lr": 1e30, "optimizer.warmup_steps": 0}
    run_file(model=MODEL, train={"sequences_per_step": 2})
    run_on(ranks, work, (2, 2, 1), 3, "nan", **more)
    records = [json.loads(line) for line in (work / "nan/metrics.jsonl").read_text().splitlines()]
    assert [record["skipped"] for record in records] == [False, True, True]
    assert [record["grad_norm"] is None for record in records] == [False, True, True]
