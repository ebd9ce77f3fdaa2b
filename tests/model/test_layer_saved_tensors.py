"""One layer by itself: saved tensors, recomputation in backward, and weight gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.activations.tensor_classes import tensor_bytes_per_token
from sppo.cost.parameters import layer_shapes
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.interface import attention_backward, attention_forward
from sppo.model.attention_mixer import AttentionMixer
from sppo.model.gradients import GradientSum, zero_gradients
from sppo.model.layer import Layer
from sppo.model.rope import RotaryTables
from tests.engine.models import VARIANTS, tiny_model
from tests.tiers import examples

TOKENS = 11


class WholeSequence:
    """Attention of a sequence that is one subsequence."""

    lacks_keys = False

    def __init__(self):
        self.attention_recomputed = 0

    def forward(self, q, k, v):
        self._k, self._v = k.clone(), v.clone()
        return attention_forward(AttentionCall(q, self._k, self._v))

    def recompute(self, q):
        self.attention_recomputed += 1
        return attention_forward(AttentionCall(q, self._k, self._v))

    def backward(self, do, q, o, lse):
        dk, dv = torch.zeros_like(self._k), torch.zeros_like(self._v)
        dq = attention_backward(
            AttentionCall(q, self._k, self._v), do, o, lse, dk_TKD=dk, dv_TKD=dv
        )
        return dq, dk, dv


class Run:
    """Forward of one layer, then any number of backwards from different saved tensors."""

    def __init__(self, variant):
        self.model = tiny_model(variant)
        torch.manual_seed(0)
        self.weights = {
            name: 0.4 * torch.randn(shape, dtype=torch.float64) + (len(shape) == 1)
            for name, shape in layer_shapes(self.model, 0).items()
        }
        positions = torch.arange(TOKENS)
        rotary = RotaryTables(self.model, positions, dtype=torch.float64).of_layer(0)
        self.x, self.dy = torch.randn(2, TOKENS, self.model.hidden_size, dtype=torch.float64)
        self.attention = WholeSequence()
        mixer = AttentionMixer(self.model, self.weights, rotary, self.attention)
        self.layer = Layer(self.model, self.weights, mixer)

    def forward(self, keep):
        with torch.no_grad():
            return self.layer.forward(self.x, keep=keep)

    def backward(self, saved):
        gradients = zero_gradients(self.weights)
        with torch.no_grad():
            dx = self.layer.backward(self.dy.clone(), saved=saved, gradients=GradientSum(gradients))
        return dx, gradients


def everything(model):
    return frozenset(tensor_bytes_per_token(model, model.layer_type(0), element_bytes=8))


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_tensors_have_the_bytes_planned_for(variant):
    run = Run(variant)
    _, saved = run.forward(everything(run.model))
    sizes = {name: t.numel() * t.element_size() / TOKENS for name, t in saved.items()}
    assert sizes == tensor_bytes_per_token(run.model, run.model.layer_type(0), element_bytes=8)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(deadline=None, max_examples=examples(5, all=12))
@given(data=st.data())
def test_any_choice_of_saved_tensors_gives_the_same_bits(variant, data):
    run = Run(variant)
    always = {"x_in", "chosen"} & everything(run.model)
    names = sorted(everything(run.model) - {"o", "lse"} - always)
    keep = always | data.draw(st.sets(st.sampled_from(names)))
    keep |= data.draw(st.sampled_from(({"o", "lse"}, set())))
    y, all_saved = run.forward(everything(run.model))
    dx, gradients = run.backward(dict(all_saved))
    assert all(gradient.any() for gradient in gradients.values())
    assert run.attention.attention_recomputed == 0
    other_y, saved = run.forward(frozenset(keep))
    assert saved.keys() == keep
    other_dx, other_gradients = run.backward(saved)
    assert run.attention.attention_recomputed == ("o" not in keep)
    assert torch.equal(y, other_y)
    assert torch.equal(dx, other_dx)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_backward_consumes_what_was_saved_and_changes_no_other_operand(variant):
    run = Run(variant)
    _, saved = run.forward(everything(run.model))
    before = {name: tensor.clone() for name, tensor in saved.items()}
    tensors = dict(saved)
    weights = {name: weight.clone() for name, weight in run.weights.items()}
    run.backward(saved)
    assert saved == {}, "a tensor left in the dictionary is memory held too long"
    for name in tensors.keys() - {"gate", "up"}:  # their gradients take their place
        assert torch.equal(tensors[name], before[name]), name
    for name, weight in weights.items():
        assert torch.equal(run.weights[name], weight), name
