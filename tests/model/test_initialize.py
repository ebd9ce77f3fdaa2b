from functools import partial

import pytest
import torch

from sppo.config import PRESETS
from sppo.config.model import ModelConfig
from sppo.cost.parameters import parameter_shapes
from sppo.model import initialize
from sppo.model.initialize import generate_weights_ahead, initial_weight, initial_weights


def model(preset="tiny-test", **fields):
    return ModelConfig.model_validate({**PRESETS[preset], **fields})


@pytest.mark.parametrize("threads", [2, 3, 100])
def test_threads_change_neither_values_nor_order(threads):
    shapes = parameter_shapes(model())
    made = list(generate_weights_ahead(shapes, model=model(), seed=0, threads=threads))
    expected = initial_weights(model(), seed=0)
    assert [name for name, _ in made] == list(expected) == list(shapes)
    assert all(torch.equal(weight, expected[name]) for name, weight in made)


@pytest.mark.parametrize(("ahead_bytes", "most"), [(4 * 2000, 2), (1, 1), (10**9, 5)])
def test_few_parameters_are_made_before_they_are_taken(monkeypatch, ahead_bytes, most):
    monkeypatch.setattr(initialize, "AHEAD_BYTES", ahead_bytes)
    begun = []
    make = initialize.initial_weight

    def counted(name, shape, **options):
        begun.append(name)
        return make(name, shape, **options)

    monkeypatch.setattr(initialize, "initial_weight", counted)
    shapes = {f"{i}.q.weight": (10, 100) for i in range(12)}
    largest = 0
    for taken, _ in enumerate(generate_weights_ahead(shapes, model=model(), seed=0, threads=5)):
        largest = max(largest, len(begun) - taken)
    assert len(begun) == 12
    assert largest <= most


def test_norms_are_one_and_biases_zero():
    gpt = model("tiny-gpt", num_layers=1, hidden_size=64, max_positions=8)
    for name, weight in initial_weights(gpt, seed=0).items():
        if name.endswith(".bias"):
            assert not weight.any(), name
        elif weight.dim() == 1:
            assert torch.all(weight == 1), name
        else:
            assert weight.unique().numel() > 0.9 * weight.numel(), name


def test_linear_attention_starts_with_finite_rates_of_decay_and_plain_norms():
    linear = {"key_heads": 50, "value_heads": 100, "key_size": 4, "value_size": 4}
    hybrid = model(
        num_layers=2, norm_offset=True, layer_types=["linear", "full"], linear_attention=linear
    )
    weights = initial_weights(hybrid, seed=0)
    rates = weights["layers.0.decay.log_rate"].exp()
    assert 0.009 < rates.min() < 3
    assert 13 < rates.max() <= 16
    for name in ("decay.bias", "linear_norm.weight"):
        assert torch.all(weights[f"layers.0.{name}"] == 1), name
    assert abs(weights["layers.0.conv_v.weight"].std() / hybrid.init_std - 1) < 0.1


def test_offsets_sinks_and_biases_of_routers_start_at_zero_and_experts_are_random():
    experts = {"count": 3, "per_token": 1, "mlp_size": 64, "router_bias": True, "bias": True}
    routed = model(
        hidden_size=64, norm_offset=True, qk_norm="all", attention_sinks=True, experts=experts
    )
    for name, weight in initial_weights(routed, seed=0).items():
        if name.endswith((".bias", "norm.weight", "sinks.weight")):
            assert not weight.any(), name
        else:
            expected = 0.01 if name.endswith(("o.weight", "down.weight")) else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.1), name
            assert weight.unique().numel() > 0.9 * weight.numel(), name


def test_residual_outputs_start_smaller():
    """Within 5 percent: a matrix of 20480 values has a standard error of 0.5 percent."""
    big = model(hidden_size=128, mlp_size=160, num_layers=8, init_std=0.03)
    for name, weight in initial_weights(big, seed=0).items():
        if weight.dim() < 2:
            continue
        residual = name.endswith(("o.weight", "down.weight"))
        expected = 0.03 / 4 if residual else 0.03  # sqrt(2 * 8 layers) = 4
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(weight.mean().item()) < 0.05 * expected, name


def test_a_function_of_seed_and_name_alone():
    """A stage that holds some layers makes the same weights as one that holds all."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    whole = initial_weights(model(), seed=3)
    assert torch.equal(torch.rand(3), expected)  # the global generator is left alone
    for name, shape in reversed(parameter_shapes(model()).items()):
        assert torch.equal(initial_weight(name, shape, model=model(), seed=3), whole[name]), name


def test_seeds_and_names_differ():
    first, second = (initial_weights(model(), seed=seed) for seed in (0, 1))
    assert not torch.equal(first["layers.0.q.weight"], second["layers.0.q.weight"])
    assert not torch.equal(first["layers.0.q.weight"], first["layers.1.q.weight"])
    assert not torch.equal(first["layers.0.gate.weight"], first["layers.0.up.weight"])


def test_factors_start_as_in_peft():
    """A as by kaiming_uniform with a = sqrt(5), and B zero; each has numbers of its own."""
    make = partial(initial_weight, model=model(), seed=3)
    a = make("layers.0.q.lora_a", (64, 100))
    assert float(a.abs().max()) == pytest.approx(0.1, rel=0.01)
    assert float(a.std()) == pytest.approx(0.1 / 3**0.5, rel=0.03)
    assert not make("layers.0.q.lora_b", (100, 64)).any()
    assert torch.equal(a, make("layers.0.q.lora_a", (64, 100)))
    assert not torch.equal(a, make("layers.1.q.lora_a", (64, 100)))
