"""Factors of adapters at step 0."""

import torch

from sppo.training.weights.starting_weights import starting_weights
from tests.make import make_run

FACTORS = ("layers.0.v.lora_a", "layers.1.down.lora_a", "layers.1.down.lora_b")


def test_factors_are_the_same_whatever_else_a_rank_holds():
    run = make_run(adapter={"rank": 3})
    whole = dict(starting_weights(run))
    assert whole["layers.1.down.lora_a"].shape == (3, run.model.mlp_size)
    some = dict(starting_weights(run, FACTORS))
    assert list(some) == list(FACTORS)
    assert all(torch.equal(weight, whole[name]) for name, weight in some.items())
    full = dict(starting_weights(make_run()))
    assert full.keys() < whole.keys()
    assert all(torch.equal(weight, whole[name]) for name, weight in full.items())
