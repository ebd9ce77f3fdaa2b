"""The same run on other grids of ranks: equal losses, and exchangeable checkpoints."""

import contextlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from sppo.checkpoint.checkpoint import read_model
from sppo.config import load_run
from sppo.planning.plan import plan_json, read_plan
from sppo.training import step_loop, trainer
from sppo.training.checks.given_plan import followed_plan
from sppo.training.checks.input_checks import check_inputs
from sppo.training.checks.preflight import preflight
from sppo.training.job import Job
from sppo.training.ranks import mesh_shape
from tests.conftest import LENGTH, write_run, write_tokens
from tests.tiers import default_of, exhaustive
from tests.training.jobs import job_of_rank

SHAPES = [(1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)]
# Constant, whatever train.steps is. With the usual eps AdamW turns the rounding of a gradient near
# zero into a share of the learning rate.
OPTIMIZER = {"schedule": "constant", "eps": 1e-4}
MODEL = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2}


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
    with (
        contextlib.chdir(directory),
        mock.patch.object(trainer, "warm_up", return_value=None),
    ):
        run = load_run(Path("run.yaml"), arguments)
        job = job_of_rank(run, rank)
        checked = preflight(job)
        outcome = trainer.train(job, checked)
        return outcome.done_steps


def alone(directory, arguments):
    return train_as(0, directory, arguments)


def losses(directory):
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return [(math.nan if m["loss"] is None else m["loss"], m["grad_norm"]) for m in records]


@pytest.fixture(scope="module")
def done_alone(tmp_path_factory):
    """A directory with the run of one rank that the others are compared with."""
    directory = tmp_path_factory.mktemp("one rank")
    write_tokens(directory / "tokens")
    write_run(
        directory / "run.yaml",
        model=MODEL,
        optimizer=OPTIMIZER,
        train={"steps": 3, "dtype": "fp32", "sequences_per_step": 2, "output": "alone"},
    )
    alone(directory, overrides((1, 1, 1), 3))
    return directory


@pytest.fixture
def job(work, done_alone):
    shutil.copy(done_alone / "run.yaml", work)
    shutil.copytree(done_alone / "alone", work / "alone")
    return work


def run_on(ranks, directory, shape, steps, output, **more):
    arguments = overrides(shape, steps, **{"train.output": output}, **more)
    count = shape[0] * shape[1] * shape[2]
    assert ranks.run(train_as, directory, arguments, ranks=count) == [steps] * count


def assert_like_alone(directory, output):
    found, expected = losses(directory / output), losses(directory / "alone")
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6, nan_ok=True)
    (_, weights), (_, others) = read_model(directory / output), read_model(directory / "alone")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", default_of(SHAPES, (2, 2, 2)), ids=str)
def test_losses_and_weights_are_those_of_one_rank(ranks, job, shape):
    run_on(ranks, job, shape, 3, "grid")
    assert_like_alone(job, "grid")


@pytest.mark.parametrize("shape", [(2, 1, 1), *exhaustive((1, 2, 1), (1, 1, 2))], ids=str)
def test_steps_and_replicas_without_labels(ranks, job, run_file, shape):
    """No label counts in sequence 1, beside another one, nor in sequences 2 and 3, a whole step."""
    starts = range(LENGTH + 1, 4 * LENGTH + 1)
    write_tokens(job / "short", documents=starts)
    run_file(
        model=MODEL,
        data={"tokens": "short", "shuffle": False, "isolate_documents": True},
        optimizer=OPTIMIZER,
        train={"steps": 3, "dtype": "fp32", "sequences_per_step": 2, "output": "alone"},
    )
    shutil.rmtree(job / "alone")
    alone(job, overrides((1, 1, 1), 3))
    assert [math.isnan(loss) for loss, _ in losses(job / "alone")] == [False, True, False]
    run_on(ranks, job, shape, 3, "grid")
    assert_like_alone(job, "grid")


def save_by_own_clock(rank, directory, arguments):
    """A rank of a run; by the clock of rank 0 alone a checkpoint is due before every step."""
    with (
        mock.patch.object(step_loop, "AUTOMATIC_S", 0.0 if rank == 0 else math.inf),
        mock.patch.object(step_loop, "SAVING_SHARE", math.inf),
    ):
        return train_as(rank, directory, arguments)


def test_all_ranks_save_by_the_clock_of_rank_0(ranks, job):
    arguments = overrides((1, 2, 1), 3, **{"train.output": "clock", "checkpoint.at_end": False})
    assert ranks.run(save_by_own_clock, job, arguments, ranks=2) == [3, 3]
    names = sorted(path.name for path in (job / "clock/checkpoints").iterdir())
    assert names == ["step_000001", "step_000002"]


@pytest.mark.parametrize("schedule", ["seq_zb_h1", "gpipe", "seq1f1b"])
def test_one_rank_follows_any_schedule(job, schedule):
    more = {"parallel.schedule": schedule, "train.output": "other"}
    alone(job, overrides((1, 1, 1), 3, **more))
    assert_like_alone(job, "other")


@pytest.mark.parametrize("shape", [(2, 2, 2), *exhaustive((1, 2, 1), (1, 3, 1))], ids=str)
def test_pieces_of_units_by_plan(ranks, job, shape):
    """Sequences long enough for pieces; the plan decides which units are cut."""
    more = {"sequence.num_subsequences": 2, "parallel.multiplexed": "on"}
    run_on(ranks, job, shape, 3, "pieces", **more)
    assert_like_alone(job, "pieces")


def test_a_run_goes_on_with_other_degrees(ranks, job):
    for steps, shape in enumerate([(2, 2, 1), (1, 3, 1), (1, 1, 2)], start=1):
        run_on(ranks, job, shape, steps, "moving")
    assert_like_alone(job, "moving")


MEGATRON = {"parallel.sequence_parallel": "megatron"}
ZERO_3 = {"parallel.zero": 3}


@pytest.mark.parametrize(
    "shape", [(1, 1, 4), *exhaustive((1, 1, 2), (2, 2, 2), (2, 1, 4))], ids=str
)
def test_ranks_that_share_weights_out_do_what_one_does(ranks, job, shape):
    """Also where two of them hold the same key/value head."""
    run_on(ranks, job, shape, 3, "grid", **MEGATRON)
    assert_like_alone(job, "grid")


@pytest.mark.parametrize(("shape", "more"), [((1, 1, 2), MEGATRON), ((2, 1, 1), ZERO_3)])
def test_msp_by_name_on_one_pipeline_rank_is_an_ordinary_schedule(ranks, job, shape, more):
    """So it goes with what units that ranks share do not go with."""
    run_on(ranks, job, shape, 3, "grid", **more, **{"parallel.schedule": "sppo_msp"})
    assert_like_alone(job, "grid")


def test_a_run_of_one_rank_goes_on_with_weights_shared_out(ranks, job):
    alone(job, overrides((1, 1, 1), 1, **{"train.output": "moving"}))
    run_on(ranks, job, (1, 1, 2), 2, "moving")
    run_on(ranks, job, (1, 2, 2), 3, "moving", **MEGATRON)
    assert_like_alone(job, "moving")


@pytest.mark.parametrize(
    ("fields", "degree", "says"),
    [
        (
            {"num_heads": 6, "num_kv_heads": 6, "head_size": 8},
            4,
            "6 query heads cannot be sharded evenly",
        ),
        (
            {"num_heads": 12, "num_kv_heads": 4, "head_size": 8},
            6,
            "must divide the 4 key/value heads",
        ),
        ({"mlp_size": 90}, 4, "the MLP's width is sharded, and 90 cannot be evenly"),
    ],
)
def test_weights_that_cannot_be_shared_out_are_refused(work, run_file, fields, degree, says):
    run_file(model={**MODEL, **fields})
    run = load_run(Path("run.yaml"), overrides((1, 1, degree), 1, **MEGATRON))
    for check in (lambda: check_inputs(run), lambda: mesh_shape(run)):
        with pytest.raises(ValueError, match=says):
            check()
    assert not Path("out").exists()


def megatron_plan(*, pipeline=1):
    """A run with sharded weights, and its plan."""
    layers = {"model.num_layers": pipeline}
    run = load_run(Path("run.yaml"), overrides((1, pipeline, 2), 1, **MEGATRON, **layers))
    return run, preflight(Job.alone(run)).plan


def test_a_plan_that_recomputes_part_of_a_class_is_refused(work):
    run, plan = megatron_plan()
    assert plan.sequence_parallel == "megatron"
    (stage,) = plan.stages
    first, *others = stage.subsequences
    tokens = first.retained[0]
    cut = replace(
        first, retained=(tokens, tokens, 8), offloaded=(0, 0, 0), recomputed=(0, 0, tokens - 8)
    )
    plan = replace(plan, stages=(replace(stage, subsequences=(cut, *others)),))
    with pytest.raises(ValueError, match=f"recomputes {tokens - 8} of {tokens} rows of linear"):
        preflight(Job.alone(run), plan)


def test_weights_shared_out_and_lent_are_refused(work):
    run, plan = megatron_plan(pipeline=2)
    with pytest.raises(ValueError, match="no rank has them: write ulysses"):
        preflight(Job.alone(run), replace(plan, schedule="sppo_msp"))


def test_a_plan_with_weights_shared_out_is_taken(work, tmp_path):
    run, plan = megatron_plan()
    (tmp_path / "plan.json").write_text(json.dumps(plan_json(plan)))
    read = read_plan(tmp_path / "plan.json")
    assert read == plan
    assert followed_plan(run, read).parallel.sequence_parallel == "megatron"


@pytest.mark.parametrize(
    "more", [{"policy": "offload_all"}, *exhaustive({"input_every": 2})], ids=str
)
def test_weights_shared_out_and_tensors_moved(ranks, job, more):
    (job / "spill").mkdir()
    keys = {f"activations.{key}": value for key, value in more.items()}
    run_on(ranks, job, (1, 1, 2), 3, "grid", **MEGATRON, **keys, **{"activations.disk": "spill"})
    assert_like_alone(job, "grid")


@pytest.mark.parametrize("tied", [True, *exhaustive(False)])
@pytest.mark.parametrize("schedule", ["seq_zb_h1", *exhaustive("gpipe")])
def test_other_schedules_and_state_that_nobody_shares(ranks, work, run_file, schedule, tied):
    run_file(
        model={**MODEL, "tie_embeddings": tied},
        train={"steps": 3, "sequences_per_step": 2, "output": "alone"},
    )
    alone(work, overrides((1, 1, 1), 3))
    more = {"parallel.schedule": schedule, "parallel.zero": int(tied)}
    run_on(ranks, work, (2, 2, 1), 3, "grid", **more)
    assert_like_alone(work, "grid")
