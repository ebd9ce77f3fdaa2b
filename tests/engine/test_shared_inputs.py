"""Layers that share one saved input: the same bits with fewer saved inputs."""

import pytest
import torch

from sppo.activations.tensor_classes import tensor_bytes_per_token
from tests.engine.models import (
    VARIANTS,
    Trained,
    assert_equal_bits,
    engine_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.tiers import each_once

CUTS = (0, 4, 5, 17)


@pytest.mark.parametrize(
    ("variant", "dtype", "input_every"),
    each_once(VARIANTS, [torch.float64, torch.bfloat16], [2, 3, 9]),
)
def test_shared_inputs_change_no_bit(variant, dtype, input_every):
    model = tiny_model(variant, num_layers=5)
    weights = random_weights(model, dtype=dtype)
    data = [random_sequence(model, 17), random_sequence(model, 17, seed=1)]
    expected = engine_step(model, weights, data, [CUTS, CUTS])
    for policy in ("retain", "keep_attention"):
        shared = Trained(model, weights, policy=policy, input_every=input_every)
        for _ in range(2):
            assert_equal_bits(shared.step(data, [CUTS, CUTS]), expected)


def test_only_the_inputs_of_some_layers_are_kept():
    model = tiny_model(num_layers=5)
    weights = random_weights(model)
    sizes = tensor_bytes_per_token(model, element_bytes=8)
    retained = {}
    for every in (1, 2, 5):
        made = Trained(model, weights, policy="keep_attention", input_every=every)
        made.step([random_sequence(model, 17)], [CUTS])
        retained[every] = made.engine.take_peaks().activations_bytes
    assert retained[1] - retained[2] == 2 * 17 * sizes["x_in"]
    assert retained[1] - retained[5] == 4 * 17 * sizes["x_in"]


def test_without_attention_output_every_layer_keeps_its_input():
    model = tiny_model(num_layers=5)
    weights = random_weights(model)
    data = [random_sequence(model, 17)]
    made = Trained(model, weights, policy="recompute", input_every=3)
    assert_equal_bits(made.step(data, [CUTS]), engine_step(model, weights, data, [CUTS]))
