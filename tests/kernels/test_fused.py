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
from sppo.kernels.attention import block_attention, merged_output
from sppo.kernels.attention import blocks as attention_blocks
from sppo.kernels.attention.torch_blocks import TorchBlocks
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
        "rms_norm": elementwise.rms_norm(x, weight, eps=1e-5),
        "layer_norm": elementwise.layer_norm(x, weight, bias, eps=1e-5),
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
    for way, options in (("", {}), (" around", {"dresidual_CE": dresidual})):
        named = (f"rms dx{way}", f"rms dweight{way}")
        gradients = elementwise.rms_norm_backward(dy, x, weight, eps=1e-5, **options)
        results |= dict(zip(named, gradients, strict=True))
        named = (f"layer dx{way}", f"layer dweight{way}", f"layer dbias{way}")
        gradients = elementwise.layer_norm_backward(dy, x, weight, bias, eps=1e-5, **options)
        results |= dict(zip(named, gradients, strict=True))
    for name, parameters in (("rms", (weight,)), ("layer", (weight, bias))):
        total = dy.clone()
        results[f"added {name}"] = getattr(elementwise, f"add_{name}_norm_")(
            total, x, *parameters, eps=1e-5
        )
        results[f"sum for {name}"] = total
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
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    monkeypatch.setattr(attention_blocks, "MAX_FULL_KEYS", 30)
    options = {"blocks": attention_blocks.attention_blocks.__wrapped__(50, 120), "window": None}
    ours = block_attention.forward(TorchBlocks(), q, k, v, scale=0.3, **options)
    assert len(as_on_a_gpu) == len(options["blocks"]) - 1
    monkeypatch.setattr(merged_output, "fused", lambda x: False)
    theirs = block_attention.forward(TorchBlocks(), q, k, v, scale=0.3, **options)
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
    normed = elementwise.add_rms_norm_(total, x, weight[0], eps=1e-5)
    assert torch.equal(total, expected)
    torch.testing.assert_close(
        normed, elementwise.rms_norm(expected, weight[0], eps=1e-5), rtol=1e-12, atol=1e-12
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
