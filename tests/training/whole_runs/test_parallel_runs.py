"""The same run in other grids, orders and tiers: equal losses, and exchangeable checkpoints."""

import json
import math
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from sppo.checkpoint.checkpoint import read_weights
from sppo.config import load_run
from sppo.planning.plan import plan_json, read_plan
from sppo.training import run_checkpoints
from sppo.training.preflight import preflight
from sppo.training.start import followed_plan
from tests.conftest import LENGTH, write_run, write_tokens
from tests.tiers import exhaustive
from tests.training.jobs import job_alone, losses, records, train_rank

# Constant, whatever train.steps is. With the usual eps AdamW turns the rounding of a gradient near
# zero into a share of the learning rate.
OPTIMIZER = {"schedule": "constant", "eps": 1e-4}
MODEL = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
STEPS = 3
LENGTHS = (2, 40, 3, 65, 5, 130, 2, 2, 33, 17, 64, 9, 90, 4)
"""Tokens of the documents, of which a sample has one less; what is longer than LENGTH is cut."""
SAMPLES = {"data": {"samples": "documents", "shuffle": True}}
REFERENCES = {
    "sequences": {},
    "four layers": {"model": {"num_layers": 4}},
    "tied": {"model": {"tie_embeddings": True}},
    "adapter": {"model": {"num_layers": 4}, "adapter": {"rank": 3, "layers": "2-3"}},
    # No label counts in sequence 1, beside another one, nor in sequences 2 and 3, a whole step.
    "no labels": {"data": {"tokens": "short", "shuffle": False, "isolate_documents": True}},
    "samples by tokens": {**SAMPLES, "train": {"tokens_per_step": 3 * LENGTH}},
}
"""Runs of one rank that others are compared with: what their files say beside the usual."""

MEGATRON = {"parallel.sequence_parallel": "megatron"}
ZERO_3 = {"parallel.zero": 3}
PIECES = {"sequence.num_subsequences": 2, "parallel.multiplexed": "on"}
DISK = {"activations.disk": "spill"}
STATE = {
    **DISK,
    "activations.policy": "keep_attention",
    "activations.kv": "retain",
    "state.weights": "disk",
    "state.gradients": "disk",
    "state.optimizer": "disk",
}
"""Everything lives on a disk, stage by stage."""
FROZEN_ON_DISK = {**STATE, "state.gradients": "device", "state.optimizer": "device"}
ONE = (1, 1, 1)
RUNS = {
    "all axes": ("sequences", [((2, 2, 2), {})]),
    "pieces of units": ("sequences", [((2, 2, 2), PIECES)]),
    # On one pipeline rank it goes with what units that ranks share do not go with.
    "pieces by name, zero 3": (
        "sequences",
        [((2, 1, 1), {**ZERO_3, "parallel.schedule": "sppo_msp"})],
    ),
    "zero 3": ("sequences", [((2, 2, 2), ZERO_3)]),
    "deferred, tied": ("tied", [((2, 2, 1), {"parallel.schedule": "seq_zb_h1"})]),
    "no labels": ("no labels", [((2, 1, 1), {})]),
    "state, zero 3": (
        "four layers",
        [((1, 1, 2), {**STATE, **ZERO_3, "parallel.virtual_stages": 3})],
    ),
    "other degrees": ("sequences", [((2, 2, 1), {}), ((1, 3, 1), {}), ((1, 1, 2), MEGATRON)]),
    "weights that come to be shared out": (
        "sequences",
        [(ONE, {}), ((1, 1, 2), {}), ((1, 2, 2), MEGATRON)],
    ),
    # A process that is alone has nothing to gather from, and keeps whole weights.
    "all shared out, then one rank": ("sequences", [((2, 1, 1), ZERO_3), (ONE, ZERO_3)]),
    "samples by tokens, other degrees": (
        "samples by tokens",
        [((2, 2, 1), {}), ((1, 1, 2), {}), (ONE, {})],
    ),
    "adapter, other degrees": ("adapter", [((2, 2, 2), {}), ((1, 1, 2), {**MEGATRON, **ZERO_3})]),
    "adapter, pieces of units": ("adapter", [((1, 2, 2), PIECES)]),
    "adapter, state": (
        "adapter",
        [((1, 1, 2), {**STATE, **ZERO_3, "parallel.virtual_stages": 2})],
    ),
    "adapter, frozen weights on a disk": (
        "adapter",
        [(ONE, {**FROZEN_ON_DISK, "parallel.virtual_stages": 4})],
    ),
}
"""By name: what a run is compared with, and its degrees and overrides, one part after another."""
SELDOM = (
    "weights that come to be shared out",
    "all shared out, then one rank",
    "no labels",
    "adapter, other degrees",
    "adapter, pieces of units",
)
"""Those that are left to the exhaustive tier."""


def overrides(shape, steps, **more):
    data, pipeline, sequence = shape
    keys = {
        "parallel.data_parallel_degree": data,
        "parallel.pipeline_parallel_degree": pipeline,
        "parallel.sequence_parallel_degree": sequence,
        "train.steps": steps,
        **more,
    }
    return [f"{key}={value}" for key, value in keys.items()]


def train_as(rank, directory, arguments):
    """One rank of a run, in the rank pool; what it wrote is in the run's directory."""
    checked, outcome = train_rank(rank, directory, arguments)
    last = outcome.timelines
    assert (last is None) == (rank > 0), "rank 0 has the executed timeline"
    if last is not None and checked.job.run.data.samples == "stream":
        digests = {timeline.schedule.digest() for timeline in (last.planned, last.measured)}
        assert digests == {checked.plan.program_digest}, "planned, simulated and executed are one"
    return outcome.done_steps


def alone(directory, arguments):
    return train_as(0, directory, arguments)


def write_samples(directory, train, *, ahead=False):
    """Token data, and a run file for more than an epoch of its samples."""
    write_reference(directory, **SAMPLES, planning={"ahead": ahead}, train=train)


def write_reference(directory, **sections):
    """Token data and a run file in ``directory``."""
    data = sections.get("data", {})
    ends = np.cumsum(LENGTHS).tolist()
    if "samples" in data:
        write_tokens(directory / "tokens", num_tokens=ends[-1], documents=ends[:-1])
    else:
        write_tokens(directory / "tokens")
        write_tokens(directory / "short", documents=range(LENGTH + 1, 4 * LENGTH + 1))
    size = {} if "samples" in data else {"sequences_per_step": 2}
    train = {"steps": STEPS, "dtype": "fp32", "output": "alone", **size}
    usual = {"model": MODEL, "optimizer": OPTIMIZER, "train": train}
    write_run(
        directory / "run.yaml",
        **{name: {**usual.get(name, {}), **sections.get(name, {})} for name in {*usual, *sections}},
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Function that returns the directory of a run of one rank, by its name; it is run once."""

    @cache
    def directory(name):
        found = tmp_path_factory.mktemp("reference")
        write_reference(found, **REFERENCES[name])
        alone(found, overrides(ONE, STEPS))
        return found

    return directory


def run_on(ranks, directory, shape, steps, output, **more):
    arguments = overrides(shape, steps, **{"train.output": output}, **more)
    count = shape[0] * shape[1] * shape[2]
    assert ranks.run(train_as, directory, arguments, ranks=count) == [steps] * count


def assert_like_alone(directory, output):
    found, expected = losses(directory / output), losses(directory / "alone")
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6, nan_ok=True)
    (_, weights), (_, others) = read_weights(directory / output), read_weights(directory / "alone")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-4, atol=1e-5)


def counted(directory):
    """What was trained on in each step: samples, and labels that counted."""
    return [(record["samples"], record["labels"]) for record in records(directory)]


@pytest.mark.parametrize(
    "name", [*(name for name in RUNS if name not in SELDOM), *exhaustive(*SELDOM)]
)
def test_training_is_that_of_one_rank(ranks, tmp_path, reference, name):
    which, parts = RUNS[name]
    job = tmp_path / "job"
    shutil.copytree(reference(which), job)
    (job / "spill").mkdir()
    for number, (shape, more) in enumerate(parts, start=1):
        steps = STEPS if number == len(parts) else number
        if shape == ONE:
            alone(job, overrides(ONE, steps, **more, **{"train.output": "other"}))
        else:
            run_on(ranks, job, shape, steps, "other", **more)
    assert_like_alone(job, "other")
    assert counted(job / "other") == counted(job / "alone")
    assert list((job / "spill").iterdir()) == []


def save_by_own_clock(rank, directory, arguments):
    """A rank of a run; by the clock of rank 0 alone a checkpoint is due before every step."""
    interval_s = 0.0 if rank == 0 else math.inf
    with mock.patch.object(run_checkpoints, "saving_interval_s", return_value=interval_s):
        return train_as(rank, directory, arguments)


def test_all_ranks_save_by_the_clock_of_rank_0(ranks, work):
    write_run(work / "run.yaml", model=MODEL)
    arguments = overrides((1, 2, 1), 3, **{"train.output": "clock", "checkpoint.at_end": False})
    assert ranks.run(save_by_own_clock, work, arguments, ranks=2) == [3, 3]
    names = sorted(path.name for path in (work / "clock/checkpoints").iterdir())
    assert names == ["step_000001", "step_000002"]


@pytest.mark.parametrize("zero", [3, *exhaustive(2)])
def test_steps_that_are_not_finite_are_skipped(ranks, work, run_file, zero):
    """A rate that no weights survive: gradients of NaN reach every shard, and no update."""
    more = {"parallel.zero": zero, "optimizer.lr": 1e30, "optimizer.warmup_steps": 0}
    run_file(model=MODEL, train={"sequences_per_step": 2})
    run_on(ranks, work, (2, 2, 1), 3, "nan", **more)
    steps = records(work / "nan")
    assert [step["skipped"] for step in steps] == [False, True, True]
    assert [step["grad_norm"] is None for step in steps] == [False, True, True]


def test_a_plan_with_weights_shared_out_is_taken_unless_it_recomputes_part_of_a_class(work):
    layers = {"model.num_layers": 1}
    run = load_run(Path("run.yaml"), overrides((1, 1, 2), 1, **MEGATRON, **layers))
    plan = preflight(job_alone(run)).plan
    Path("plan.json").write_text(json.dumps(plan_json(plan)))
    read = read_plan(Path("plan.json"))
    assert read == plan
    assert followed_plan(run, read).parallel.sequence_parallel == "megatron"
    (stage,) = plan.stages
    first, *others = stage.subsequences
    tokens = first.retained[0]
    cut = replace(
        first, retained=(tokens, tokens, 8), offloaded=(0, 0, 0), recomputed=(0, 0, tokens - 8)
    )
    plan = replace(plan, stages=(replace(stage, subsequences=(cut, *others)),))
    with pytest.raises(ValueError, match=f"recomputes {tokens - 8} of {tokens} rows of linear"):
        preflight(job_alone(run), plan)
