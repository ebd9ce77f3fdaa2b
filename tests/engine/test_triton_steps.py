"""A whole step on Triton's kernels, under the interpreter, against the plain model in float64."""

import pytest

from sppo.kernels import cross_entropy, elementwise, fused, grouped, rotary, sinks
from sppo.kernels.attention import interface, merged_output
from sppo.kernels.attention.choice import KERNELS
from tests.engine.models import (
    Trained,
    assert_same_step,
    autograd_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.kernels.places import need_triton
from tests.tiers import default_of

SOME_VARIANTS = (
    "experts, first layer dense",
    "gqa, q/k-norm",
    "mqa, window, biases",
    "gpt",
    "mixed: layernorm, rotary, q/k-norm, linear",
    "gemma: norms on both sides",
    "gpt-oss: sinks, window",
    "granite: scales, no rotation in layer 1",
    "glm: both norms, partial rotation",
)
"""Both norms, all kinds of positions and heads, every activation, a window, sinks, scales."""


@pytest.fixture
def triton_everywhere(monkeypatch):
    """As on a GPU: for norms, activations, rotary turns, the loss, and merges of attention."""
    need_triton("cpu")
    monkeypatch.setattr(interface, "kernel_of", lambda call: KERNELS["torch_blocks"])
    for module in (fused, elementwise, grouped, rotary, merged_output, cross_entropy, sinks):
        monkeypatch.setattr(module, "fused", lambda x: True)


@pytest.mark.parametrize(
    "variant",
    default_of(
        SOME_VARIANTS, "mixed: layernorm, rotary, q/k-norm, linear", "gpt-oss: sinks, window"
    ),
)
def test_a_step_has_the_gradients_of_the_plain_model(variant, triton_everywhere):
    model = tiny_model(variant)
    weights = random_weights(model)
    sequences = [random_sequence(model, 23, starts=(0, 9))]
    trained = Trained(model, weights, policy="recompute")
    ours = trained.step(sequences, [(0, 7, 8, 23)])
    assert_same_step(ours, autograd_step(model, weights, sequences), tolerance=1e-10)
