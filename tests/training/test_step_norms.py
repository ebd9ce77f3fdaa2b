"""Clipping factor of every step, and norms by kind of parameter every few steps."""

import math

import pytest
import torch

from sppo.config import load_run
from sppo.training.weights.starting_weights import starting_weights
from tests.training.jobs import losses, records, train_alone, trained

MODEL = {"num_layers": 2, "qk_norm": True, "tie_embeddings": True}
KINDS = {"embed", "attention", "mlp", "norm"}


def norms_of_start(run):
    """Norms of the weights of step 0 by kind, from their names."""
    squares = dict.fromkeys(KINDS, 0.0)
    for name, weight in starting_weights(run):
        module = name.split(".")[-2]
        kind = {"embed": "embed", "gate": "mlp", "up": "mlp", "down": "mlp"}.get(module)
        kind = kind or ("norm" if "norm" in module else "attention")
        squares[kind] += float(torch.linalg.vector_norm(weight.double())) ** 2
    return {kind: math.sqrt(square) for kind, square in squares.items()}


@pytest.fixture
def run(work, run_file):
    run_file(model=MODEL, optimizer={"clip_norm": 0.5, "lr": 1e-2})
    return load_run(work / "run.yaml")


def test_norms_by_kind_make_up_the_global_norm_and_change_nothing(work, run):
    train_alone(run.with_values({"train.output": "plain"}))
    train_alone(run.with_values({"train.norms_every": 2}))
    plain, found = records(work / "plain"), records(work / "out")
    assert losses(work / "out") == losses(work / "plain")
    assert [record["norms"] is None for record in found] == [True, False, True, False]
    assert all(record["norms"] is None for record in plain)
    for record in found:
        factor = min(1.0, 0.5 / (record["grad_norm"] + 1e-6))
        assert record["clipped"] == pytest.approx(factor, rel=1e-6)
        if record["norms"] is not None:
            assert record["norms"].keys() == KINDS
            total = math.hypot(*(of["gradient"] for of in record["norms"].values()))
            assert total == pytest.approx(record["grad_norm"], rel=1e-6)
    assert any(record["clipped"] < 1 for record in found)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.pipeline_parallel_degree=2"],
        ["parallel.data_parallel_degree=2", "parallel.zero=0", "train.sequences_per_step=2"],
        [
            *("parallel.sequence_parallel_degree=2", "parallel.sequence_parallel=megatron"),
            *("model.num_heads=2", "model.num_kv_heads=1"),
        ],
    ],
    ids=["pipeline, tied", "replicas, whole state", "sharded weights"],
)
def test_every_element_counts_once_on_two_ranks(ranks, work, run, overrides):
    words = [*overrides, "train.norms_every=1", "train.steps=1"]
    ranks.run(trained, work, words, ranks=2)
    (record,) = records(work / "out")
    norms = record["norms"]
    expected = norms_of_start(load_run(work / "run.yaml", overrides))
    assert {kind: of["weight"] for kind, of in norms.items()} == pytest.approx(expected, rel=1e-9)
    total = math.hypot(*(of["gradient"] for of in norms.values()))
    assert total == pytest.approx(record["grad_norm"], rel=1e-6)


def test_a_step_that_is_not_finite_has_null_norms_and_no_factor(work, run):
    broken = run.with_values({"train.norms_every": 1, "train.z_loss": 3e38, "train.steps": 1})
    train_alone(broken.with_values({"checkpoint.at_end": False}))
    (record,) = records(work / "out")
    assert record["skipped"]
    assert record["clipped"] is None
    assert record["norms"]["attention"]["gradient"] is None
