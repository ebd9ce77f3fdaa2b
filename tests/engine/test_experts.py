"""Whole steps of models with experts: the plain model in float64, whatever the cut and the policy.

Legend: X experts.
"""

import pytest
import torch

from sppo.activations.policy import POLICIES
from sppo.config.routing import RoutingConfig
from sppo.cost.parameters import choice_bias_shapes
from sppo.engine import expert_loads
from sppo.engine.pipeline import Pipeline
from sppo.model import experts as experts_module
from tests.engine.models import (
    EXPERTS,
    Trained,
    assert_same_step,
    autograd_step,
    random_sequence,
    random_weights,
    tiny_model,
)
from tests.tiers import each_once

ROUTING = RoutingConfig(balance_loss=0.05, z_loss=0.01)
TWO_CUTS = [(0, 4, 5, 17), (0, 6, 9)]
LAYERS = 3


def model_of(kind, **fields):
    return tiny_model(num_layers=LAYERS, num_kv_heads=2, experts={**EXPERTS[kind], **fields})


def biases_of(model):
    generator = torch.Generator().manual_seed(3)
    shapes = choice_bias_shapes(model)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def two_sequences(model):
    return [random_sequence(model, 17, starts=(0, 7)), random_sequence(model, 9, seed=1)]


@pytest.mark.parametrize(
    ("kind", "policy"), each_once(EXPERTS, [*POLICIES, "every second input"]), ids=str
)
def test_a_step_has_the_gradients_of_the_plain_model(kind, policy):
    model = model_of(kind, choice_bias=kind == "glm")
    weights, biases, sequences = random_weights(model), biases_of(model), two_sequences(model)
    options = {"policy": policy}
    if policy not in POLICIES:
        options = {"policy": "keep_attention", "pipeline": Pipeline(input_every=2)}
    made = Trained(model, weights, routing=ROUTING, choice_biases=biases, **options)
    expected = autograd_step(model, weights, sequences, routing=ROUTING, choice_biases=biases)
    assert_same_step(made.step(sequences, TWO_CUTS), expected, tolerance=1e-10)


def test_loads_and_losses_of_routers_are_the_same_for_every_cut(monkeypatch):
    """Counts are integers, so the gradients of the balance loss at the scores have the same bits.

    Forward alone counts: recomputation of layers does not.
    """
    model = model_of("softmax")
    weights, data = random_weights(model), [random_sequence(model, 17)]
    terms_of, found = expert_loads.RoutingTerms, []
    for cuts in ((0, 17), (0, 6, 17), (0, 2, 5, 9, 16, 17)):
        given = []

        def recorded(*terms, given=given):
            given.append(terms)
            return terms_of(*terms)

        monkeypatch.setattr(expert_loads, "RoutingTerms", recorded)
        made = Trained(model, weights, policy="recompute", routing=ROUTING)
        for gradient in made.gradients.values():
            gradient.zero_()
        loads = made.engine.accumulate(data, [cuts]).expert_loads
        assert all(int(loads_X.sum()) == 17 * 2 for loads_X in loads.values())
        backward = [terms for _, *terms in given[-LAYERS:]]
        found.append((torch.stack([loads[n] for n in range(LAYERS)]), backward))
    (loads, terms), *others = found
    for other_loads, other_terms in others:
        assert torch.equal(loads, other_loads)
        for (balance_X, z_loss), (other_X, other_z) in zip(terms, other_terms, strict=True):
            assert torch.equal(balance_X, other_X)
            assert z_loss == other_z


def test_forward_chooses_and_backward_does_not(monkeypatch):
    """Every unit and layer chooses once, in forward, although all layers are recomputed."""
    model, calls = model_of("qwen2"), []
    choose = experts_module.choose
    monkeypatch.setattr(
        experts_module, "choose", lambda *given: calls.append(given) or choose(*given)
    )
    made = Trained(model, random_weights(model), policy="recompute")
    made.step(two_sequences(model), TWO_CUTS)
    assert len(calls) == LAYERS * 5


def test_a_step_without_labels_has_no_gradients():
    model = model_of("softmax")
    data = random_sequence(model, 9)
    data.labels_S.fill_(-100)
    made = Trained(model, random_weights(model), routing=ROUTING)
    for gradient in made.gradients.values():
        gradient.zero_()
    made.engine.accumulate([data], [(0, 4, 9)])
    assert not any(gradient.any() for gradient in made.gradients.values())
