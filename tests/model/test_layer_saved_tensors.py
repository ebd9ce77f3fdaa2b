"""One layer by itself: saved tensors, recomputation in backward, and weight gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.engine.saved_rows import cut
from tests.engine.models import VARIANTS, tiny_model
from tests.model.one_layer import MIXERS, OneLayer
from tests.tiers import examples

TOKENS = 11
ALL = [*VARIANTS, *MIXERS]


def one_layer(variant):
    return OneLayer(tiny_model(**MIXERS[variant]) if variant in MIXERS else tiny_model(variant))


@pytest.mark.parametrize("variant", ALL)
def test_saved_tensors_have_the_bytes_planned_for(variant):
    run = one_layer(variant)
    _, saved = run.forward()
    sizes = {name: t.numel() * t.element_size() / TOKENS for name, t in saved.items()}
    assert sizes == run.bytes_per_token


def choice_of_tensors(run, draw):
    """Names to save: those that nothing recomputes, both or none of o and lse, any others."""
    always = {"x_in", "chosen"} & run.everything
    names = sorted(run.everything - {"o", "lse"} - always)
    keep = always | draw(st.sets(st.sampled_from(names)))
    return keep | draw(st.sampled_from(({"o", "lse"} & run.everything, set())))


@pytest.mark.parametrize("variant", ALL)
@settings(deadline=None, max_examples=examples(5, all=12))
@given(data=st.data())
def test_any_choice_of_saved_tensors_gives_the_same_bits(variant, data):
    run = one_layer(variant)
    keep = choice_of_tensors(run, data.draw)
    y, all_saved = run.forward()
    dx, gradients = run.backward(dict(all_saved))
    assert all(gradient.any() for gradient in gradients.values())
    linear = "o" not in run.everything  # which recomputes its output in every backward
    assert run.core.recomputed == linear
    other_y, saved = run.forward(frozenset(keep))
    assert saved.keys() == keep
    other_dx, other_gradients = run.backward(saved)
    assert run.core.recomputed == (2 if linear else "o" not in keep)
    assert torch.equal(y, other_y)
    assert torch.equal(dx, other_dx)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[name]), name


@pytest.mark.parametrize("variant", MIXERS)
@settings(deadline=None, max_examples=examples(5, all=12))
@given(data=st.data())
def test_rows_that_were_not_saved_are_recomputed(variant, data):
    run = one_layer(variant)
    dx, gradients = run.backward(run.forward()[1])
    keep = choice_of_tensors(run, data.draw) | ({"x_mid", "attention_out"} & run.everything)
    rows = dict.fromkeys(keep - {"x_in", "chosen"}, data.draw(st.integers(1, TOKENS - 1)))
    saved = run.forward(frozenset(keep))[1]
    saved |= cut(saved, rows, {})["offloaded"]
    other_dx, other_gradients = run.backward(saved)
    assert saved == {}
    torch.testing.assert_close(other_dx, dx, rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=0, atol=1e-11)


@pytest.mark.parametrize("variant", ALL)
def test_backward_consumes_what_was_saved_and_changes_no_other_operand(variant):
    run = one_layer(variant)
    _, saved = run.forward()
    before = {name: tensor.clone() for name, tensor in saved.items()}
    tensors = dict(saved)
    weights = {name: weight.clone() for name, weight in run.weights.items()}
    run.backward(saved)
    assert saved == {}, "a tensor left in the dictionary is memory held too long"
    overwritten = {"gate", "up", "attention_gate", "linear_gate"}  # by their gradients
    for name in tensors.keys() - overwritten:
        assert torch.equal(tensors[name], before[name]), name
    for name, weight in weights.items():
        assert torch.equal(run.weights[name], weight), name
