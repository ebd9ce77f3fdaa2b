"""Rows of a rank of which only some parameters train, and those of a rank on which none does."""

import pytest
import torch

from sppo.cost.state_tiers import StateTiers
from sppo.cost.trainable import EVERYTHING, Adapter, Trainable
from sppo.engine.pipeline import ALONE, Pipeline
from sppo.optim.sharded_state import ShardedState
from sppo.parallel.mesh import alone
from tests.engine.models import tiny_model

LORA = Trainable(Adapter(rank=2, scale=1.0, targets=("q", "down"), layers=(1,)), ())
NORMS = Trainable(only=("*norm.weight",))
TIED = {"tie_embeddings": True}


def sharded(trainable, *, pipeline=ALONE, zero=0, **fields):
    model = tiny_model(**fields)
    return ShardedState(
        model,
        mesh=alone(),
        pipeline=pipeline,
        device=torch.device("cpu"),
        zero=zero,
        trainable=trainable,
    )


def rows_of(shapes):
    return {key: torch.zeros(shape) for key, shape in shapes.items()}


def test_rows_are_split_where_some_train_and_some_do_not():
    everything = {"embed.weight", "layers.0 of stage", "layers.1 of stage", "head.weight"}
    everything.add("final_norm.weight")
    assert set(sharded(EVERYTHING).weight_shapes) == everything
    assert set(sharded(EVERYTHING).gradient_shapes) == everything
    found = sharded(LORA)
    assert set(found.weight_shapes) == {*everything, "layers.1 of stage, trained"}
    assert found.gradient_shapes == {"layers.1 of stage, trained": (2 * (12 + 24) + 2 * (18 + 12),)}
    assert set(sharded(NORMS).gradient_shapes) == {
        "layers.0 of stage, trained",
        "layers.1 of stage, trained",
        "final_norm.weight",
    }


def test_only_what_trains_has_gradients_an_optimizer_and_a_place_in_checkpoints():
    found = sharded(LORA)
    factors = {f"layers.1.{name}.lora_{ab}" for name in ("q", "down") for ab in "ab"}
    gradients, weights = rows_of(found.gradient_shapes), rows_of(found.weight_shapes)
    assert set(found.owned_shapes) == set(found.owned(gradients)) == factors
    assert set(found.owned(weights)) == factors
    assert found.owned_of("layers.1.q.weight", torch.zeros(24, 12)) == {}
    assert set(found.squares_by_kind(found.owned(gradients))) == {"attention", "mlp"}
    provider = found.gradient_provider(gradients)
    assert set(provider.take(1)) == {name.removeprefix("layers.1.") for name in factors}
    for part in (0, "embedding", "head"):
        assert provider.take(part) == {}


@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_on_which_nothing_trains(zero):
    below = Pipeline(num_ranks=2, rank=0)
    found = sharded(LORA, pipeline=below, zero=zero)
    assert (found.gradient_shapes, found.owned_shapes) == ({}, {})
    assert found.blocks({"optimizer.step": torch.tensor(3)}).keys() == {"optimizer.step"}
    provider = found.gradient_provider({})
    assert provider.take(0) == provider.take("embedding") == {}
    provider.reduce(0)
    provider.wait_reductions()
    found.finish({})
    weights = rows_of(found.weight_shapes)
    found.gather(weights)
    assert set(found.provider(weights).take(0)) >= {"q.weight", "down.weight"}


@pytest.mark.parametrize(
    ("only", "fields", "embedding", "head"),
    [
        (("final_norm.*",), {}, set(), {"final_norm.weight"}),
        (("final_norm.*",), TIED, set(), {"final_norm.weight"}),
        (("embed.*",), {}, {"embed.weight"}, set()),
        (("embed.*",), TIED, {"embed.weight"}, {"embed.weight"}),
        (("head.*",), {}, set(), {"head.weight"}),
    ],
)
def test_sums_of_the_ends_of_the_model(only, fields, embedding, head):
    found = sharded(Trainable(only=only), **fields)
    provider = found.gradient_provider(rows_of(found.gradient_shapes))
    assert set(provider.take("embedding")) == embedding
    assert set(provider.take("head")) == head


def test_weights_that_train_leave_the_device_with_the_optimizer_only():
    found = sharded(LORA)
    frozen = {key for key in found.weight_shapes if "trained" not in key}
    assert found.streamed_keys(StateTiers()) == []
    assert set(found.streamed_keys(StateTiers(weights="host"))) == frozen
    both = StateTiers(weights="host", optimizer="host")
    assert set(found.streamed_keys(both)) == set(found.weight_shapes)
