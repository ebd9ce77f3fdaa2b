"""The same run on other grids of ranks: same losses, and checkpoints that go between them."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from sppo.config import load_run
from sppo.parallel.mesh import Mesh
from sppo.parallel.progress import RankProgress
from sppo.train import trainer
from sppo.train.checkpoint import read_model
from sppo.train.peers import Peers
from sppo.train.preflight import check_before_training
from sppo.train.ranks import Ranks, mesh_shape

SHAPES = [(1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)]
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
    import os

    os.chdir(directory)
    trainer.warm_up = lambda run, lengths: None
    run = load_run(Path("run.yaml"), arguments)
    shape = mesh_shape(run)
    mesh = Mesh(shape, rank=rank, timeout_s=30.0)
    ranks = Ranks(mesh, Peers(mesh), RankProgress.create(None), shape.num_ranks)
    plan = ranks.decided_by_main(
        lambda: check_before_training(run, local_ranks=shape.num_ranks).plan
    )
    preflight = check_before_training(run, plan=plan, local_ranks=shape.num_ranks)
    outcome = trainer.train(run, preflight, console=Console(quiet=True), ranks=ranks)
    return outcome.done_steps


def alone(directory, arguments):
    return train_as(0, directory, arguments)


def losses(directory):
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [(m["loss"], m["grad_norm"]) for m in map(json.loads, lines)]


@pytest.fixture
def job(work, run_file):
    run_file(
        model=MODEL,
        optimizer={"schedule": "constant"},  # whatever train.steps is
        train={"steps": 3, "dtype": "fp32", "sequences_per_step": 2, "output": "alone"},
    )
    alone(work, overrides((1, 1, 1), 3))
    return work


def run_on(ranks, directory, shape, steps, output, **more):
    arguments = overrides(shape, steps, **{"train.output": output}, **more)
    count = shape[0] * shape[1] * shape[2]
    assert ranks.run(train_as, directory, arguments, ranks=count) == [steps] * count


def assert_like_alone(directory, output):
    found, expected = losses(directory / output), losses(directory / "alone")
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6)
    (_, weights), (_, others) = read_model(directory / output), read_model(directory / "alone")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_weights_are_those_of_one_rank(ranks, job, shape):
    run_on(ranks, job, shape, 3, "grid")
    assert_like_alone(job, "grid")


def test_a_run_goes_on_with_other_degrees(ranks, job):
    for steps, shape in enumerate([(2, 2, 1), (1, 3, 1), (1, 1, 2)], start=1):
        run_on(ranks, job, shape, steps, "moving")
    assert_like_alone(job, "moving")


MEGATRON = {"parallel.sequence_parallel": "megatron"}


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 2, 2), (1, 1, 4), (2, 1, 4)], ids=str)
def test_ranks_that_share_weights_out_do_what_one_does(ranks, job, shape):
    """Also where two of them hold the same key/value head."""
    run_on(ranks, job, shape, 3, "grid", **MEGATRON)
    assert_like_alone(job, "grid")


def test_a_run_goes_on_with_other_sequence_parallelism(ranks, job):
    run_on(ranks, job, (2, 1, 4), 1, "moving", **MEGATRON)
    run_on(ranks, job, (1, 2, 2), 2, "moving")
    alone(job, overrides((1, 1, 1), 3, **{"train.output": "moving"}))
    assert_like_alone(job, "moving")


def test_a_run_of_one_rank_goes_on_with_weights_shared_out(ranks, job):
    alone(job, overrides((1, 1, 1), 1, **{"train.output": "moving"}))
    run_on(ranks, job, (1, 1, 2), 2, "moving")
    run_on(ranks, job, (1, 2, 2), 3, "moving", **MEGATRON)
    assert_like_alone(job, "moving")


@pytest.mark.parametrize("zero", [0, 1])
def test_biases_and_norms_of_shared_weights(ranks, work, run_file, zero):
    """GPT-2's shape: every linear layer has a bias, and the embedding is tied."""
    run_file(
        model={
            **MODEL,
            "norm": "layernorm",
            "mlp": "gelu_tanh",
            "position": "learned",
            "max_positions": 64,
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "tie_embeddings": True,
        },
        optimizer={"clip_norm": 0.1},
        train={"steps": 3, "sequences_per_step": 2, "output": "alone"},
    )
    alone(work, overrides((1, 1, 1), 3))
    run_on(ranks, work, (2, 2, 2), 3, "grid", **MEGATRON, **{"parallel.zero": zero})
    assert_like_alone(work, "grid")


def test_a_run_of_many_ranks_goes_on_alone(ranks, job):
    run_on(ranks, job, (1, 2, 2), 2, "back")
    alone(job, overrides((1, 1, 1), 3, **{"train.output": "back"}))
    assert_like_alone(job, "back")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["seq_zb_h1", "gpipe"])
def test_other_schedules_and_state_that_nobody_shares(ranks, work, run_file, schedule, tied):
    run_file(
        model={**MODEL, "tie_embeddings": tied},
        train={"steps": 3, "sequences_per_step": 2, "output": "alone"},
    )
    alone(work, overrides((1, 1, 1), 3))
    more = {"parallel.schedule": schedule, "parallel.zero": int(tied)}
    run_on(ranks, work, (2, 2, 1), 3, "grid", **more)
    assert_like_alone(work, "grid")
