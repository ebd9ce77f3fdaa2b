"""Element-wise functions are Triton's on a GPU: the same results under the same names."""

import logging

import pytest
import torch

from sppo.kernels import (
    cross_entropy,
    elementwise,
    fused,
    rotary,
)
from sppo.kernels.attention import blocks as attention_blocks
from sppo.kernels.attention import merged_output
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import KERNELS
from sppo.kernels.rotary import RotaryTable
from tests.kernels.places import need_triton


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Every tensor counts as one on a GPU; the interpreter takes the launches."""
    need_triton("cpu")
    launched = []

    def always(x):
        launched.append(x)
        return True

    monkeypatch.setattr(fused, "fused", always)
    for module in (elementwise, rotary, merged_output, cross_entropy):
        monkeypatch.setattr(module, "fused", always)
    return launched


def everything():
    """Results of all functions by name, in float64."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, dy, weight, bias = random(13, 48), random(13, 48), random(48), random(48)
    dresidual = random(13, 48)
    gate, up, dhidden = random(13, 40), random(13, 40), random(13, 40)
    heads, angle = random(13, 3, 16), random(13, 1, 8)
    table = RotaryTable(angle.cos(), angle.sin())
    results = {
        "rotate": rotary.rotate(heads, table),
        "rotate_backward": rotary.rotate_backward(heads, table),
    }
    for kind in ("swiglu", "gelu", "gelu_tanh"):
        its_gate = gate if kind == "swiglu" else None
        results[kind] = elementwise.activation(its_gate, up, kind=kind)
        inner = elementwise.activation_backward_(
            dhidden.clone(), None if its_gate is None else gate.clone(), up.clone(), kind=kind
        )
        results |= {f"{kind} hidden": inner.hidden_CF, f"{kind} dup": inner.dup_CF}
        if inner.dgate_CF is not None:
            results[f"{kind} dgate"] = inner.dgate_CF
    for name, parameters in {"rms": (weight, None), "layer": (weight, bias)}.items():
        total = dy.clone()
        results[f"{name} norm"] = elementwise.norm(x, *parameters, eps=1e-5)
        results[f"{name} after adding"] = elementwise.add_norm_(total, x, *parameters, eps=1e-5)
        results[f"{name} sum"] = total
        for around in (None, dresidual):
            gradients = elementwise.norm_backward(dy, x, *parameters, eps=1e-5, dresidual_CE=around)
            for what, value in zip(("dx", "dweight", "dbias"), gradients, strict=True):
                if value is not None:
                    results[f"{name} {what}{'' if around is None else ' around'}"] = value
    terms = cross_entropy.LossTerms(label_smoothing=0.1, z_loss=0.02)
    labels = torch.arange(13).masked_fill(torch.arange(13) % 4 == 0, cross_entropy.IGNORED_LABEL)
    logits = x.clone()
    results["losses alone"] = cross_entropy.token_losses(x.clone(), labels, terms=terms)
    results["losses"] = cross_entropy.losses_to_gradient_(logits, labels, scale=0.3, terms=terms)
    return results | {"logits": logits}


def test_every_function_has_its_kernel(as_on_a_gpu, monkeypatch):
    fused_results = everything()
    assert len(as_on_a_gpu) == 18  # calls of functions
    for module in (elementwise, rotary, cross_entropy, fused):
        monkeypatch.setattr(module, "fused", lambda x: False)
    for name, value in everything().items():
        torch.testing.assert_close(fused_results[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_partial_attentions_merge_in_their_kernel(as_on_a_gpu, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shapes = [(50, 6, 8), (120, 2, 8), (120, 2, 8)]
    call = AttentionCall(
        *(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    )
    monkeypatch.setattr(attention_blocks, "MAX_FULL_KEYS", 30)
    attention_blocks.attention_blocks.cache_clear()
    ours = KERNELS["torch_blocks"].forward(call)
    assert len(as_on_a_gpu) == 3  # of a prefix of 70 keys in three parts, and the diagonal
    monkeypatch.setattr(merged_output, "fused", lambda x: False)
    theirs = KERNELS["torch_blocks"].forward(call)
    attention_blocks.attention_blocks.cache_clear()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_what_cannot_be_written_over_is_left_to_torch(as_on_a_gpu):
    up = torch.randn(6, 8, dtype=torch.float64)[:, ::2]
    dhidden = torch.ones_like(up)
    expected = elementwise.activation_backward_(dhidden.clone(), None, up.clone(), kind="gelu")
    inner = elementwise.activation_backward_(dhidden, None, up, kind="gelu")
    torch.testing.assert_close(inner.dup_CF, expected.dup_CF, rtol=1e-12, atol=1e-12)
    assert inner.hidden_CF is up


def test_a_sum_that_cannot_be_written_over_is_left_to_torch(as_on_a_gpu):
    total, x, weight = torch.randn(3, 6, 8, dtype=torch.float64)
    expected, total = total + x, total.repeat_interleave(2, 1)[:, ::2]
    normed = elementwise.add_norm_(total, x, weight[0], eps=1e-5)
    assert torch.equal(total, expected)
    torch.testing.assert_close(
        normed, elementwise.norm(expected, weight[0], eps=1e-5), rtol=1e-12, atol=1e-12
    )


def test_a_cpu_keeps_to_torch():
    assert not fused.fused(torch.ones(1))


def test_without_a_working_triton_torch_serves_and_says_so(monkeypatch, caplog):
    pytest.importorskip("triton")
    from sppo.kernels.triton import activations

    def broken(*arguments, **options):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(activations, "activation", broken)
    fused._triton_works.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not fused._triton_works(torch.device("cpu"))
        assert not fused._triton_works(torch.device("cpu"))
    fused._triton_works.cache_clear()
    assert [record.message.partition("does not: ")[2] for record in caplog.records] == [
        "RuntimeError: Failed to find C compiler."
    ]
