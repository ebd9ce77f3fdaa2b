"""Runs whose ranks hold only their rows of gradients and weights (ZeRO-2 and 3)."""

import pytest

from tests.tiers import each_once, exhaustive
from tests.training.jobs import records, train_rank
from tests.training.whole_runs.test_parallel_runs import MODEL, overrides, run_on


def predicted_and_measured(rank, directory, arguments):
    """(predicted, measured) bytes of weights and of gradients on one of two replicas."""
    checked, outcome = train_rank(rank, directory, arguments)
    device = checked.plan.stages[0].memory.device
    return [
        (getattr(device, name), getattr(outcome.buckets, name))
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
    steps = records(work / "nan")
    assert [step["skipped"] for step in steps] == [False, True, True]
    assert [step["grad_norm"] is None for step in steps] == [False, True, True]
