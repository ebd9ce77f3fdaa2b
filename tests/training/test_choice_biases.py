"""Biases by which experts are chosen: moved by loads, and found where a run starts.

Legend: L layers, X experts.
"""

import torch

from sppo.config import load_run
from sppo.training.weights.choice_biases import balance_, starting_choice_biases
from tests.conftest import RUN

EXPERTS = {"count": 4, "per_token": 2, "mlp_size": 8, "choice_bias": True, "dense_layers": 1}
SHAPE = {"preset": "tiny-test", "vocab_size": 32, "num_layers": 3, "experts": EXPERTS}


def biases_of_a_run():
    run = load_run({**RUN, "model": SHAPE})
    return starting_choice_biases(run, start=None, device=torch.device("cpu"))


def test_every_layer_with_experts_has_zeros_at_first():
    biases = biases_of_a_run()
    assert [*biases] == ["layers.1.router.choice_bias", "layers.2.router.choice_bias"]
    assert all(torch.equal(bias_X, torch.zeros(4)) for bias_X in biases.values())


def test_experts_below_the_mean_load_rise_and_the_others_fall():
    biases = biases_of_a_run()
    loads_LX = torch.tensor([[0, 0, 0, 0], [8, 0, 3, 5], [4, 4, 4, 4]], dtype=torch.float64)
    balance_(biases, loads_LX, amount=0.25)
    first, second = biases.values()
    assert first.tolist() == [-0.25, 0.25, 0.25, -0.25]
    assert second.tolist() == [0, 0, 0, 0]
