"""The gated delta rule beside its definition, token by token, and the choice of its back end."""

import logging
import sys
from importlib import metadata
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from sppo.kernels import delta_rule
from sppo.kernels.chunked_rule import RuleOperands, chunked_rule, chunked_state
from tests.kernels.operands import TOLERANCE, assert_close, dtype_name
from tests.kernels.places import NO_GPU

KEY_SIZE, VALUE_SIZE, KEY_HEADS = 5, 3, 2
CASES = {
    "a token": (1, 1, ()),
    "a document of one token": (2, 2, (0, 1)),
    "one token less than a chunk": (63, 3, (3,)),
    "a document begins with the last token": (64, 1, (63,)),
    "a document begins with a chunk": (65, 2, (64,)),
    "chunks": (201, 3, ()),
    "many documents in chunks": (201, 2, (0, 5, 64, 70, 71, 190)),
}
"""Tokens, value heads of a key head, and starts of documents."""


def operands(tokens, group, starts=(), *, key_size=KEY_SIZE, value_size=VALUE_SIZE):
    """Operands in float64 and gradients of both results; half of the heads decay slowly."""
    random = torch.Generator().manual_seed(tokens)
    heads = KEY_HEADS * group

    def drawn(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q, k = (functional.normalize(drawn(tokens, KEY_HEADS, key_size), dim=-1) for _ in range(2))
    g = -drawn(tokens, heads).square()
    g[:, ::2] *= 0.01
    g[:, 1::2] *= 10
    v, do = (drawn(tokens, heads, value_size) for _ in range(2))
    state, dstate = (drawn(heads, key_size, value_size) for _ in range(2))
    x = RuleOperands(q * key_size**-0.5, k, v, g, drawn(tokens, heads).sigmoid(), state, starts)
    return x, (do, dstate)


def token_by_token(x):
    """Outputs and the state behind, by the definition."""
    state, group = x.state_HKV, x.v_CHV.shape[1] // x.k_CJK.shape[1]
    q, k = (heads.repeat_interleave(group, dim=1) for heads in (x.q_CJK, x.k_CJK))
    outputs = []
    for t in range(len(x.v_CHV)):
        if t in x.starts:
            state = torch.zeros_like(state)
        state = x.g_CH[t].exp()[:, None, None] * state
        found = torch.einsum("hkv,hk->hv", state, k[t])
        added = x.beta_CH[t, :, None] * (x.v_CHV[t] - found)
        state = state + torch.einsum("hk,hv->hkv", k[t], added)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state


def results(rule, x, gradients):
    """Outputs, state, and the gradients of the six operands; zero where nothing depends on one."""
    leaves = [operand.detach().clone().requires_grad_() for operand in x[:6]]
    found = rule(RuleOperands(*leaves, x.starts))
    grads = torch.autograd.grad(found, leaves, gradients, materialize_grads=True)
    return [tensor.detach() for tensor in (*found, *grads)]


def rounded(x, gradients, dtype, *, device="cpu"):
    """Operands and gradients as a run in a dtype has them, and the same in float64."""
    narrow = [tensor.to(device, dtype) for tensor in (*x[:3], gradients[0])]
    wide = [tensor.to(device, torch.float32) for tensor in (*x[3:6], gradients[1])]
    run = RuleOperands(*narrow[:3], *wide[:3], x.starts), (narrow[3], wide[3])
    exact = RuleOperands(*(t.double().cpu() for t in run[0][:6]), x.starts)
    return *run, exact, tuple(t.double().cpu() for t in run[1])


@pytest.mark.parametrize(("tokens", "group", "starts"), CASES.values(), ids=CASES)
def test_chunks_give_the_outputs_state_and_gradients_of_single_tokens(tokens, group, starts):
    x, gradients = operands(tokens, group, starts)
    expected = results(token_by_token, x, gradients)
    for ours, exact in zip(results(chunked_rule, x, gradients), expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    assert torch.equal(chunked_state(x), chunked_rule(x)[1])


EXTREMES = {
    "equal keys, which nothing forgets": lambda x: x._replace(
        k_CJK=x.k_CJK[:1].expand_as(x.k_CJK),
        g_CH=torch.zeros_like(x.g_CH),
        beta_CH=torch.ones_like(x.beta_CH),
    ),
    "all is forgotten": lambda x: x._replace(g_CH=torch.full_like(x.g_CH, -1000.0)),
    "some tokens forget all": lambda x: x._replace(g_CH=-1000.0 * (x.g_CH < -0.1)),
}


@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
def test_fp32_is_exact_to_roundings_where_decays_and_keys_are_extreme(extreme):
    x, gradients = operands(201, 2, (70,))
    x, gradients, *exact = rounded(extreme(x), gradients, torch.float32)
    expected = results(token_by_token, *exact)
    for ours, wide in zip(results(chunked_rule, x, gradients), expected, strict=True):
        assert_close(ours, wide, tolerance=2e-6)


def test_the_state_behind_keeps_no_other_memory():
    x, _ = operands(201, 2)
    for state in (chunked_rule(x)[1], chunked_state(x)):
        assert state.untyped_storage().nbytes() == state.nbytes


@pytest.fixture
def fla(monkeypatch):
    """The package fla-core, of which the rule is token by token; its options may be changed."""
    package = {"version": "0.6.1", "triton": "3.7.1", "rule": _fla_rule}

    def version(name):
        found = package["version"] if name == "fla-core" else package["triton"]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = lambda *tensors, **options: package["rule"](*tensors, **options)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(delta_rule.metadata, "version", version)
    delta_rule._fla_works.cache_clear()
    yield package
    delta_rule._fla_works.cache_clear()


def _fla_rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, **edges):
    """What chunk_gated_delta_rule is documented to do, for a batch of one."""
    ends = edges["cu_seqlens"]
    ends = [0, v.shape[1]] if ends is None else ends.tolist()
    assert output_final_state
    assert len(initial_state) == len(ends) - 1
    outputs, states = [], []
    for state, start, end in zip(initial_state, ends[:-1], ends[1:], strict=True):
        rows = (x[0, start:end].to(state.dtype) for x in (q * scale, k, v, g, beta))
        o, last = token_by_token(RuleOperands(*rows, state))
        outputs.append(o.to(v.dtype))
        states.append(last)
    return torch.cat(outputs)[None], torch.stack(states)


@pytest.mark.parametrize("starts", [(), (0,), (5, 9), (0, 1, 30)])
def test_fla_is_given_documents_as_sequences_and_the_state_to_the_first(fla, starts):
    x, gradients = operands(40, 2, starts)
    expected = results(token_by_token, x, gradients)
    for ours, exact in zip(results(delta_rule._fla_rule, x, gradients), expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def works(caplog):
    """Whether fla-core is used for bf16, and what is logged."""
    delta_rule._fla_works.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        used = [delta_rule._fla_works(torch.device("cpu"), torch.bfloat16, 16, 8) for _ in range(2)]
    return used[0], [record.message.partition("on cpu: fla-core ")[2] for record in caplog.records]


def test_fla_is_used_if_it_is_right_on_a_small_case(fla, caplog):
    assert works(caplog) == (True, [])


class _WrongGradient(torch.autograd.Function):
    """Its argument, whose gradient comes back multiplied by a factor."""

    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context, dx):
        return context.factor * dx, None


def _wrong_decay_gradient(q, k, v, g, beta, **options):
    return _fla_rule(q, k, v, _WrongGradient.apply(g, 1.1), beta, **options)


def _without_state_gradient(*tensors, initial_state, **options):
    return _fla_rule(*tensors, initial_state=initial_state.detach() + 0 * initial_state, **options)


def _nan_in_a_gradient(q, k, v, g, beta, **options):
    return _fla_rule(q, k, v, g, _WrongGradient.apply(beta, torch.nan), **options)


def _refuses(*tensors, **options):
    raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs\nis not for gated rules")


BROKEN = {
    "not installed": ({"version": None}, "is not installed (pip install 'sppo[fla]')"),
    "old": ({"version": "0.5.2"}, "0.5.2 has known wrong gradients: install 0.6 or later"),
    "wrong gradient": ({"rule": _wrong_decay_gradient}, "0.6.1 is wrong on a small case: 1.0e-01"),
    "no gradient of the state": (
        {"rule": _without_state_gradient},
        "0.6.1 is wrong on a small case: 1.0e+00",
    ),
    "NaN": ({"rule": _nan_in_a_gradient}, "0.6.1 is wrong on a small case: nan"),
    "refuses": (
        {"rule": _refuses},
        "0.6.1 fails on a small case with RuntimeError: Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs",
    ),
}


@pytest.mark.parametrize(("triton", "used"), [("3.3.1", True), ("3.6.0", False), ("3.7.1", True)])
def test_a_triton_with_wrong_gradients_is_not_compiled_for(fla, caplog, monkeypatch, triton, used):
    monkeypatch.setattr(delta_rule, "_is_hopper", lambda device: True)
    fla["triton"] = triton
    rule, calls = fla["rule"], []
    fla["rule"] = lambda *tensors, **options: calls.append(1) or rule(*tensors, **options)
    found, reasons = works(caplog)
    assert (found, bool(calls)) == (used, used)
    assert reasons == [] or reasons[0].endswith("with this triton: install 3.7.1 or later")


@pytest.mark.parametrize(("broken", "reason"), BROKEN.values(), ids=BROKEN)
def test_fla_is_left_alone_with_a_reason(fla, caplog, broken, reason):
    fla.update(broken)
    assert works(caplog) == (False, [reason])


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_torch_gives_the_same_on_a_gpu(dtype):
    x, gradients = operands(300, 2, (0, 70, 71), key_size=128, value_size=128)
    x, gradients, *exact = rounded(x, gradients, dtype, device="cuda")
    expected = results(chunked_rule, *exact)
    for ours, wide in zip(results(chunked_rule, x, gradients), expected, strict=True):
        assert_close(ours, wide, tolerance=max(2e-6, TOLERANCE[dtype]))


@pytest.mark.gpu
@NO_GPU
def test_fla_gives_the_same_on_a_gpu():
    reason = delta_rule._why_not_fla(torch.device("cuda", 0), torch.bfloat16, 128, 128)
    if reason is not None:
        pytest.skip(f"fla-core {reason}")
    x, gradients = operands(1000, 2, (333, 640), key_size=128, value_size=128)
    x, gradients, *exact = rounded(x, gradients, torch.bfloat16, device="cuda")
    expected = results(chunked_rule, *exact)
    for ours, wide in zip(results(delta_rule.delta_rule, x, gradients), expected, strict=True):
        assert_close(ours, wide, tolerance=0.02)
