"""Experts of one layer by themselves: outputs, gradients, and the choice that is made once."""

import pytest
import torch

from sppo.config.routing import RoutingConfig
from sppo.cost import tiles
from sppo.cost.parameters import layer_shapes
from sppo.model import experts as experts_module
from sppo.model.experts import ExpertMlp
from sppo.model.gradients import DeferredGradients, GradientSum, zero_gradients
from sppo.model.router import RoutingTerms
from tests.engine.expert_reference import mixture, routing_loss
from tests.engine.models import tiny_model

TOKENS = 19
KINDS = {
    "softmax": {},
    "normalized, k = X": {"normalize": True, "per_token": 6, "scale": 1.5},
    "one each": {"per_token": 1, "normalize": False},
    "one expert": {"count": 1, "per_token": 1},
    "gpt-oss": {"score": "softmax_chosen", "bias": True, "router_bias": True},
    "glm": {
        "score": "sigmoid",
        "normalize": True,
        "scale": 2.5,
        "choice_bias": True,
        "groups": 3,
        "groups_per_token": 2,
        "shared_mlp_size": 5,
    },
    "qwen2": {"shared_mlp_size": 9, "shared_switch": True},
}
ROUTING = RoutingConfig(balance_loss=0.3, z_loss=0.02)


class Run:
    """One mixture of experts, its tokens and the gradient of its output."""

    def __init__(self, kind):
        own = {"count": 6, "per_token": 2, "mlp_size": 7, **KINDS[kind]}
        self.model = tiny_model(experts=own)
        torch.manual_seed(0)
        self.weights = {
            name: 0.5 * torch.randn(shape, dtype=torch.float64)
            for name, shape in layer_shapes(self.model, 0).items()
            if name.startswith(("router", "expert", "shared"))
        }
        self.x, self.dy = torch.randn(2, TOKENS, self.model.hidden_size, dtype=torch.float64)
        self.bias = torch.randn(own["count"]) if own.get("choice_bias") else None
        self.buffers = {} if self.bias is None else {"router.choice_bias": self.bias}

    def mlp(self, terms=None):
        return ExpertMlp(self.model, self.weights, 1.0, terms or RoutingTerms(self.bias))

    def expected(self, dy, *, routing=None, chosen=None):
        """Output, gradient of the tokens, and gradients of the weights, by autograd."""
        x = self.x.clone().requires_grad_()
        leaves = {n: w.clone().requires_grad_() for n, w in self.weights.items()}
        routed = mixture(self.model, leaves | self.buffers, "", x, chosen=chosen)
        loss = (routed.out_SE * dy).sum()
        if routing is not None:
            loss = loss + routing_loss(self.model, routing, routed)
        loss.backward()
        return routed, x.grad, {n: w.grad for n, w in leaves.items()}

    @torch.no_grad()
    def backward(self, inputs, *, terms=None, deferred=False):
        totals = zero_gradients(self.weights)
        sums = GradientSum(totals)
        sink = DeferredGradients(totals.keys()) if deferred else sums
        dx = self.mlp(terms).backward(self.dy.clone(), self.x, inputs, sink)
        if deferred:
            sink.add_up(sums)
        return dx, totals


def assert_equal(actual, expected):
    assert torch.allclose(actual[0], expected[0], rtol=1e-10, atol=1e-12)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        wanted = torch.zeros_like(actual[1][name]) if gradient is None else gradient
        assert torch.allclose(actual[1][name], wanted, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_are_those_of_autograd(kind):
    run = Run(kind)
    routed, *expected = run.expected(run.dy)
    with torch.no_grad():
        inputs = run.mlp().inputs(run.x)
        assert inputs.keys() == run.mlp().names
        assert torch.allclose(run.mlp().output(inputs), routed.out_SE, rtol=1e-12, atol=1e-12)
    saved = {"chosen": inputs["chosen"]}  # all else is recomputed
    assert_equal(run.backward(dict(inputs), deferred=True), expected)
    assert_equal(run.backward(saved), expected)


@pytest.mark.parametrize("kind", ["gpt-oss", "glm"])
def test_tiles_of_tokens_have_the_same_output_and_gradients(kind, monkeypatch):
    """19 tokens in tiles of 6; a sink that sums over ranks takes those of all tokens at once."""
    run = Run(kind)
    with torch.no_grad():
        inputs = run.mlp().inputs(run.x)
        output = run.mlp().output(inputs)
    expected = run.backward({"chosen": inputs["chosen"]})
    monkeypatch.setitem(tiles.EXPERT_ROWS, "cpu", 2)
    with torch.no_grad():
        inputs = run.mlp().inputs(run.x)
        assert torch.allclose(run.mlp().output(inputs), output, rtol=1e-12, atol=1e-12)
    calls = []
    monkeypatch.setattr(
        GradientSum, "expert_products", _counted(GradientSum.expert_products, calls)
    )
    assert_equal(run.backward(dict(inputs)), expected)
    assert calls.count("expert_down.weight") == 4
    calls.clear()
    monkeypatch.setattr(GradientSum, "takes_tiles", False)
    assert_equal(run.backward({"chosen": inputs["chosen"]}), expected)
    assert calls.count("expert_down.weight") == 1


def _counted(method, calls):
    def call(sink, name, **operands):
        calls.append(name)
        method(sink, name, **operands)

    return call


@pytest.mark.parametrize("kind", ["softmax", "gpt-oss", "glm"])
def test_the_losses_of_the_router_have_their_gradients(kind):
    run = Run(kind)
    routed, *expected = run.expected(run.dy, routing=ROUTING)
    counts = torch.nn.functional.one_hot(routed.chosen_Sk, 6).sum((0, 1)).double()
    balance_X = ROUTING.balance_loss * 6 * counts / TOKENS**2
    terms = RoutingTerms(run.bias, balance_X, ROUTING.z_loss / TOKENS)
    assert_equal(run.backward(run.mlp().inputs(run.x), terms=terms), expected)


def test_backward_reads_the_choice_of_forward(monkeypatch):
    """Of equal experts rounding chooses one; the gradients are those of the one that was chosen."""
    run = Run("one each")
    run.weights["router.weight"][1:] = run.weights["router.weight"][0]
    chosen = torch.arange(TOKENS, dtype=torch.int16)[:, None] % 6
    _, *expected = run.expected(run.dy, chosen=chosen.long())
    monkeypatch.setattr(experts_module, "choose", None)
    assert_equal(run.backward({"chosen": chosen}), expected)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bf16_is_rounded_but_the_logits_of_the_router_are_not(kind):
    """With the choice of the same logits in float64, output and gradients are off by roundings."""
    run = Run(kind)
    run.x = run.x.bfloat16().double()
    run.weights = {name: weight.bfloat16().double() for name, weight in run.weights.items()}
    inputs = run.mlp().inputs(run.x)
    expected, chosen = run.mlp().output(inputs), inputs["chosen"]
    gradient, gradients = run.backward(inputs)
    for tensors in (run.weights, vars(run)):
        for name, tensor in tensors.items():
            if torch.is_tensor(tensor) and tensor.dtype == torch.float64:
                tensors[name] = tensor.bfloat16()
    inputs = run.mlp().inputs(run.x)
    assert torch.equal(inputs["chosen"].sort(1).values, chosen.sort(1).values)
    found = run.mlp().output(inputs)
    assert found.dtype == torch.bfloat16
    dx, others = run.backward(inputs)
    assert _error(found, expected) < 0.02
    assert _error(dx, gradient) < 0.03
    assert max(_error(others[name], g) for name, g in gradients.items()) < 0.03


def _error(found, expected):
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-9))


@pytest.mark.parametrize("only", [0, 5])
def test_all_tokens_may_choose_one_expert(only):
    run = Run("one each")
    run.weights["router.weight"].zero_()
    run.weights["router.weight"][only] = 40 * run.x.sum(0)
    run.x = run.x.abs() * run.x.sum(0).sign()
    routed, *expected = run.expected(run.dy)
    assert torch.equal(routed.chosen_Sk.unique(), torch.tensor([only]))
    dx, gradients = run.backward(run.mlp().inputs(run.x))
    assert_equal((dx, gradients), expected)
    idle = [expert for expert in range(6) if expert != only]
    assert not gradients["expert_down.weight"][idle].any()
