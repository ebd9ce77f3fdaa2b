"""One layer by itself: output and gradients by autograd, and those of the published modules."""

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from sppo.engine.unit import SequenceData, document_positions
from sppo.model.gradients import GradientSum, zero_gradients
from tests.engine.models import tiny_model
from tests.engine.reference import layer_output
from tests.model.one_layer import HYBRID, MIXERS, OneLayer

TOKENS = 71  # more than a chunk of the rule, and no whole number of them
STARTS = (4, 5, 23)


def autograd_layer(run, starts):
    """Output of the layer and all gradients, by autograd of the oracle."""
    x = run.x.clone().requires_grad_()
    weights = {name: weight.clone().requires_grad_() for name, weight in run.weights.items()}
    tokens = torch.zeros(len(x), dtype=torch.long)
    data = SequenceData(tokens, tokens, (0, *starts))
    positions = document_positions(len(x), data.document_starts)
    y = layer_output(run.model, weights, "", x, positions, data, 0)
    dx, *found = torch.autograd.grad(y, [x, *weights.values()], run.dy)
    return y.detach(), dx, dict(zip(weights, found, strict=True))


def assert_close(found, expected, *, tolerance, name=""):
    """Within ``tolerance`` of the largest expected value."""
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize("variant", MIXERS)
def test_gradients_of_a_layer_are_those_of_autograd(variant):
    starts = STARTS if variant.startswith("linear") else ()
    run = OneLayer(tiny_model(**MIXERS[variant]), tokens=TOKENS, starts=starts)
    y, dx, gradients = autograd_layer(run, starts)
    found_y, saved = run.forward()
    found_dx, found = run.backward(saved)
    assert_close(found_y, y, tolerance=1e-12)
    assert_close(found_dx, dx, tolerance=1e-11)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, tolerance=1e-11, name=name)


def published_sizes(model):
    """Keys of a configuration of transformers for the mixer of a model."""
    linear = model.linear_attention
    return {
        "hidden_size": model.hidden_size,
        "rms_norm_eps": model.norm_eps,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_size,
        "linear_value_head_dim": linear.value_size,
        "linear_conv_kernel_dim": linear.conv_size,
    }


def qwen3_5(model, weights):
    """Module of Qwen3.5, and its parameters by name."""
    module = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**published_sizes(model)), 0)
    parameters = {
        "in_proj_qkv.weight": torch.cat([weights[f"linear_{x}.weight"] for x in "qkv"]),
        "in_proj_z.weight": weights["linear_gate.weight"],
        "in_proj_b.weight": weights["linear_beta.weight"],
        "in_proj_a.weight": weights["linear_decay.weight"],
    }
    return module, parameters


def qwen3_next(model, weights):
    """Module of Qwen3-Next, which groups rows by key head, and its parameters by name."""
    module = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**published_sizes(model)), 0)

    def grouped(*names):
        heads = model.linear_attention.key_heads
        rows = [weights[f"linear_{name}.weight"].unflatten(0, (heads, -1)) for name in names]
        return torch.cat(rows, dim=1).flatten(0, 1)

    return module, {
        "in_proj_qkvz.weight": grouped("q", "k", "v", "gate"),
        "in_proj_ba.weight": grouped("beta", "decay"),
    }


PUBLISHED = {"qwen3_5": qwen3_5, "qwen3_next": qwen3_next}


def published_mixer(made, run, dtype):
    """Output, gradient of the input, and gradients by name of a published module."""
    weights = {name: weight.to(dtype) for name, weight in run.weights.items()}
    module, parameters = made(run.model, weights)
    parameters |= {
        "conv1d.weight": torch.cat([weights[f"conv_{x}.weight"] for x in "qkv"])[:, None],
        "A_log": weights["decay.log_rate"],
        "dt_bias": weights["decay.bias"],
        "norm.weight": weights["linear_norm.weight"],
        "out_proj.weight": weights["linear_o.weight"],
    }
    module.to(dtype).load_state_dict(parameters)
    x = run.x.to(dtype)[None].requires_grad_()
    y = module(x)
    y.backward(run.dy.to(dtype)[None])
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return y[0].detach(), x.grad[0], gradients


def own_mixer(run):
    """Output, gradient of the input, and gradients by name of our mixer."""
    mixer, gradients = run.layer.mixer, zero_gradients(run.weights)
    with torch.no_grad():
        y = mixer.forward(run.x, lambda **_: None)
        saved = {"x_in": run.x}
        dx = mixer.backward(run.dy, run.x, saved, GradientSum(gradients))
    return y, dx, gradients


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_mixer_is_that_of_published_models(name):
    run = OneLayer(tiny_model(**HYBRID), tokens=TOKENS)
    y, dx, gradients = own_mixer(run)
    expected_y, expected_dx, expected = published_mixer(PUBLISHED[name], run, torch.float32)
    assert_close(expected_y, y, tolerance=1e-5)
    assert_close(expected_dx, dx, tolerance=1e-5)
    for ours, theirs in {
        "decay.log_rate": "A_log",
        "decay.bias": "dt_bias",
        "linear_norm.weight": "norm.weight",
        "linear_o.weight": "out_proj.weight",
    }.items():
        assert_close(expected[theirs], gradients[ours], tolerance=1e-5, name=ours)


def test_weights_in_bf16_cost_what_they_cost_a_published_model():
    """Rates of decay in bf16, too: they are rounded as transformers rounds them."""
    exact = OneLayer(tiny_model(**HYBRID), tokens=512)
    expected = own_mixer(exact)
    theirs = published_mixer(qwen3_5, exact, torch.bfloat16)
    ours = own_mixer(OneLayer(exact.model, tokens=512, dtype=torch.bfloat16))
    for found, published, value in zip(ours[:2], theirs[:2], expected[:2], strict=True):
        error, of_published = (
            float((x.double() - value).norm() / value.norm()) for x in (found, published)
        )
        assert error <= 1.1 * of_published
