"""A whole step on Triton's kernels, under the interpreter, against the plain model in float64."""

import pytest
import torch

from sppo.kernels import cross_entropy, elementwise, fused, rotary
from sppo.kernels.attention import merged_output
from tests.engine.models import (
    Trained,
    assert_same_step,
    autograd_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.kernels.places import need_triton

SOME_VARIANTS = (
    "gqa, q/k-norm",
    "mqa, window, biases",
    "gpt",
    "mixed: layernorm, rotary, q/k-norm, linear",
)
"""Both norms, all kinds of positions and heads, gated and plain MLPs, a window."""


@pytest.fixture
def triton_everywhere(monkeypatch):
    """Also for norms, activations, rotary turns and the loss, which it serves on a GPU only."""
    need_triton("cpu")
    for module in (fused, elementwise, rotary, merged_output, cross_entropy):
        monkeypatch.setattr(module, "fused", lambda x: True)


@pytest.mark.parametrize("variant", SOME_VARIANTS)
def test_a_step_has_the_gradients_of_the_plain_model(variant, triton_everywhere):
    model = tiny_model(variant)
    weights = random_weights(model)
    sequences = [random_sequence(model, 23, starts=(0, 9))]
    trained = Trained(model, weights, policy="recompute", attention_backend="triton")
    ours = trained.step(sequences, [(0, 7, 8, 23)])
    assert_same_step(ours, autograd_step(model, weights, sequences), tolerance=1e-10)


@pytest.mark.parametrize("variant", SOME_VARIANTS)
def test_recomputed_tensors_have_their_bits(variant, triton_everywhere):
    """The residual stream too, which forward sums in the norm's kernel and backward by itself."""
    model = tiny_model(variant)
    weights = random_weights(model)
    sequences = [random_sequence(model, 23, starts=(0, 9))]
    (loss, gradients), (loss_again, gradients_again) = (
        Trained(model, weights, policy=policy, attention_backend="triton").step(
            sequences, [(0, 7, 8, 23)]
        )
        for policy in ("retain", "recompute")
    )
    assert loss == loss_again
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name
