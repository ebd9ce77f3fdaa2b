"""The recurrence of a sequence in subsequences beside the whole sequence, token by token."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from sppo.config.model import LinearAttention
from sppo.model import recurrence
from sppo.model.recurrence import RECURRENCE_WEIGHTS, Recurrence
from tests.engine.linear_reference import document_outputs

TOKENS, WIDTHS = 150, {"q": 10, "k": 10, "v": 12, "decay": 4, "beta": 4}
LINEAR = LinearAttention(key_heads=2, value_heads=4, key_size=5, value_size=3)
CUTS = {
    "whole": (0, TOKENS),
    "units of one, two and three tokens": (0, 40, 41, 43, 44, 45, 48, 49, 50, 130, 133, TOKENS),
    "documents begin with units": (0, 20, 50, 70, 71, TOKENS),
}
STARTS = {
    "one document": (0,),
    "documents": (0, 1, 20, 50, 70, 71),
    "beside cuts": (0, 41, 42, 47, 49, 132),
}


def problem(dtype=torch.float64):
    """Weights, projections and the gradient of the outputs; half of the heads decay slowly."""
    random = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    weights = {f"conv_{name}.weight": drawn(WIDTHS[name], 4) for name in "qkv"}
    rates = torch.tensor([0.001, 8.0, 0.05, 16.0], dtype=dtype)
    weights |= {"decay.log_rate": rates.log(), "decay.bias": drawn(4)}
    return weights, drawn(TOKENS, sum(WIDTHS.values())), drawn(TOKENS, 4, 3)


def expected(weights, qkvab, do, starts):
    """Outputs of the oracle, and the gradients of the projections and the weights."""
    leaves = [x.clone().requires_grad_() for x in (qkvab, *weights.values())]
    of_layer = dict(zip(weights, leaves[1:], strict=True))
    rows = torch.eye(qkvab.shape[1], dtype=qkvab.dtype).split(list(WIDTHS.values()))
    of_layer |= {f"linear_{name}.weight": part for name, part in zip(WIDTHS, rows, strict=True)}
    model = SimpleNamespace(linear_attention=LINEAR)
    o = torch.cat(
        [
            document_outputs(model, of_layer, "", leaves[0][start:end])
            for start, end in pairwise((*starts, TOKENS))
        ]
    )
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def in_units(weights, qkvab, do, starts, cuts):
    """The same by units, each from the state before it; no state where a document begins."""
    units, states, outputs = [], [], []
    state = None
    for start, end in pairwise(cuts):
        inside = [position - start for position in starts if start < position < end]
        units.append(Recurrence(weights, LINEAR, qkvab[start:end], inside))
        states.append(None if start in starts else state)
        o, state = units[-1].forward(states[-1])
        outputs.append(o)
    dqkvab, dweights, dstate = [], dict.fromkeys(RECURRENCE_WEIGHTS, 0), None
    for unit, state, (start, end) in reversed(
        list(zip(units, states, pairwise(cuts), strict=True))
    ):
        dinputs, found, dstate = unit.backward(do[start:end], dstate, state)
        dstate = None if state is None else dstate
        dqkvab.append(dinputs)
        dweights = {name: dweights[name] + found[name] for name in found}
    return [torch.cat(outputs), torch.cat(dqkvab[::-1]), *dweights.values()]


@pytest.mark.parametrize("tile", [64, 4096])
@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_any_units_give_the_outputs_and_gradients_of_the_whole(cuts, starts, tile, monkeypatch):
    monkeypatch.setattr(recurrence, "RECURRENCE_TOKENS", tile)
    weights, qkvab, do = problem()
    whole = expected(weights, qkvab, do, starts)
    for ours, exact in zip(in_units(weights, qkvab, do, starts, cuts), whole, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


def test_a_run_in_bf16_keeps_an_fp32_state_and_sums_in_fp32():
    weights, qkvab, do = problem(torch.bfloat16)
    found = in_units(weights, qkvab, do, (0, 20), (0, 70, TOKENS))
    exact = expected(*problem_in_float64(weights, qkvab, do), (0, 20))
    assert [x.dtype for x in found] == [torch.bfloat16] * 2 + [torch.float32] * 5
    for ours, wide in zip(found, exact, strict=True):
        assert (ours - wide).norm() < 0.01 * wide.norm()
    whole = Recurrence(weights, LINEAR, qkvab)
    _, state = whole.forward(None)
    *_, dstate = whole.backward(do, None, state)
    assert [x.dtype for x in (*state, *dstate)] == [torch.float32, torch.bfloat16] * 2


def problem_in_float64(weights, *tensors):
    return {name: w.double() for name, w in weights.items()}, *(x.double() for x in tensors)
