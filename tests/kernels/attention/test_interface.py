"""Attention composed of flash blocks against its definition: any span, heads, window, documents.

float64 has to agree to 1e-12 of the largest value: sums of a few hundred terms with a unit roundoff
of 1e-16 leave three digits of room. bf16 keeps 8 bits: its unit roundoff, u = 2^-8, is what one
rounding of the result may cost; the kernel rounds its weights too. Random inputs measure 0.75 u
forward and 1.1 u backward in relative Frobenius norm; the bounds are 1 u and 2 u.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.kernels.attention import block_attention, cpu_flash
from sppo.kernels.attention import blocks as attention_blocks
from sppo.kernels.attention import kernel as attention_kernel
from sppo.kernels.attention.interface import (
    attention_backward,
    attention_forward,
)
from sppo.units import MIB
from tests.kernels.allocations import allocated_bytes, peak_bytes

BF16_ROUNDOFF = 2.0**-8


def random_inputs(c, t, n, k, d, *, seed=0, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (c, n, d), "k": (t, k, d), "v": (t, k, d), "do": (c, n, d)}
    factors = {"q": scale, "k": 1.0, "v": 1.0, "do": 1.0}
    return {
        name: (torch.randn(shape, generator=generator) * factors[name]).to(dtype)
        for name, shape in shapes.items()
    }


def attend(inputs, *, backend, dtype=None, **options):
    """Forward and backward by name, computed in ``dtype``."""
    q, k, v, do = (inputs[name].to(dtype or inputs["q"].dtype) for name in ("q", "k", "v", "do"))
    o, lse = attention_forward(q, k, v, backend=backend, **options)
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    dk, dv = torch.zeros_like(k, dtype=acc_dtype), torch.zeros_like(v, dtype=acc_dtype)
    dq = attention_backward(do, q, k, v, o, lse, dk_TKD=dk, dv_TKD=dv, backend=backend, **options)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def assert_close(actual, expected, *, tolerance):
    for name, value in expected.items():
        error = (actual[name].double() - value.double()).abs().max()
        bound = tolerance * max(float(value.abs().max()), 1.0)
        assert error <= bound, f"{name}: {float(error):.2e} above {bound:.2e}"


def assert_exact_in_float64(inputs, **options):
    ours = attend(inputs, backend="cpu_flash", **options)
    assert all(value.dtype is torch.float64 for value in ours.values())
    # Scores of a thousand times a thousand cancel to nearly nothing behind a peaked softmax.
    assert_close(ours, attend(inputs, backend="reference", **options), tolerance=1e-11)


def relative_errors(actual, expected):
    return {
        name: float((actual[name].double() - value).norm() / value.norm())
        for name, value in expected.items()
    }


@st.composite
def cases(draw):
    t = draw(st.integers(1, 60))
    k = draw(st.integers(1, 3))
    starts = draw(st.sets(st.integers(1, t - 1), max_size=4)) if t > 1 else set()
    return {
        "shape": (
            draw(st.integers(1, t)),
            t,
            k * draw(st.integers(1, 8)),
            k,
            draw(st.sampled_from((2, 6, 10, 32))),
        ),
        "seed": draw(st.integers(0, 1000)),
        "scale": draw(st.sampled_from((0.0, 1.0, 30.0))),
        "options": {
            "window": draw(st.none() | st.integers(1, t + 2)),
            "document_starts": (0, *sorted(starts)),
            "scale": draw(st.none() | st.just(0.3)),
        },
        "tiles": draw(st.sampled_from(((1024, 512), (16, 8), (3, 2)))),
    }


@settings(deadline=None, max_examples=70)
@given(cases())
def test_any_span_equals_its_definition(case):
    causal, band = case["tiles"]
    limits = {"MAX_CAUSAL_TOKENS": causal, "BAND_TILE_TOKENS": band}
    inputs = random_inputs(*case["shape"], seed=case["seed"], scale=case["scale"])
    with (
        mock.patch.multiple(attention_blocks, **limits),
        mock.patch.object(
            attention_kernel, "attention_blocks", attention_blocks.attention_blocks.__wrapped__
        ),
    ):
        assert_exact_in_float64(inputs, **case["options"])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((300, 900, 8, 2, 64), {}),
        ((301, 901, 6, 3, 128), {}),
        ((257, 1500, 8, 1, 64), {}),
        ((900, 900, 4, 4, 96), {"window": 100}),
        ((500, 900, 4, 2, 32), {"document_starts": (0, 250, 650, 700)}),
        ((1250, 1250, 2, 1, 64), {}),
    ],
)
def test_bf16_stays_within_its_rounding(shape, options):
    inputs = random_inputs(*shape, dtype=torch.bfloat16)
    ours = attend(inputs, backend="cpu_flash", **options)
    assert {name: value.dtype for name, value in ours.items()} == {
        "o": torch.bfloat16,
        "lse": torch.float32,
        "dq": torch.bfloat16,
        "dk": torch.float32,
        "dv": torch.float32,
    }
    exact = attend(inputs, backend="reference", dtype=torch.float64, **options)
    errors = relative_errors(ours, exact)
    assert errors["o"] <= BF16_ROUNDOFF, errors
    assert errors["lse"] <= 1e-5, errors  # kept in fp32
    assert max(errors[name] for name in ("dq", "dk", "dv")) <= 2 * BF16_ROUNDOFF, errors


def in_pieces(inputs, cuts):
    """Spans forward in order and backward in reverse, one accumulator for all."""
    acc_dtype = torch.promote_types(inputs["k"].dtype, torch.float32)
    dk, dv = (torch.zeros_like(inputs[name], dtype=acc_dtype) for name in "kv")
    outputs, dq = [], []
    for a, b in zip(cuts, cuts[1:], strict=False):
        k, v = inputs["k"][:b], inputs["v"][:b]
        outputs.append(attention_forward(inputs["q"][a:b], k, v))
    for a, b, (o, lse) in reversed(list(zip(cuts, cuts[1:], outputs, strict=False))):
        k, v, q, do = inputs["k"][:b], inputs["v"][:b], inputs["q"][a:b], inputs["do"][a:b]
        dq.append(attention_backward(do, q, k, v, o, lse, dk_TKD=dk[:b], dv_TKD=dv[:b]))
    o = torch.cat([o for o, _ in outputs])
    return {"o": o, "dq": torch.cat(dq[::-1]), "dk": dk, "dv": dv}


def test_bf16_pieces_are_no_worse_than_the_whole():
    inputs = random_inputs(900, 900, 4, 2, 64, dtype=torch.bfloat16)
    exact = attend(inputs, backend="reference", dtype=torch.float64)
    del exact["lse"]
    split = relative_errors(in_pieces(inputs, (0, 1, 130, 300, 555, 700, 899, 900)), exact)
    whole = relative_errors(attend(inputs, backend="cpu_flash"), exact)
    assert all(split[name] <= 1.5 * whole[name] for name in exact), (split, whole)


@pytest.fixture(params=[2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_few_heads_split_keys_over_threads(threads, kv_heads):
    """1771 prefix keys: three parts at most, and a rest of one that fits none."""
    inputs = random_inputs(60, 1831, 4 * kv_heads, kv_heads, 16)
    spy = mock.Mock(wraps=cpu_flash._backward_in_parts)
    with mock.patch.object(cpu_flash, "_backward_in_parts", spy):
        assert_exact_in_float64(inputs)
    splits = threads % kv_heads != 0 or kv_heads == 1
    assert [call.kwargs["parts"] for call in spy.call_args_list] == ([threads] if splits else [])


def test_few_heads_in_bf16_keep_their_accuracy(threads):
    inputs = random_inputs(60, 1831, 4, 1, 64, dtype=torch.bfloat16)
    exact = attend(inputs, backend="reference", dtype=torch.float64)
    errors = relative_errors(attend(inputs, backend="cpu_flash"), exact)
    assert max(errors[name] for name in ("dq", "dk", "dv")) <= 2 * BF16_ROUNDOFF, errors


class Watched(cpu_flash.CpuFlash):
    """Notes which storages the kernel is handed."""

    def __init__(self):
        self.storages = []

    def forward(self, q, k, v, **options):
        self.storages.append((k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()))
        return super().forward(q, k, v, **options)

    def backward(self, do, q, k, v, o, lse, **options):
        self.storages.append((k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()))
        return super().backward(do, q, k, v, o, lse, **options)


@pytest.mark.parametrize("window", [None, 50])
def test_keys_and_values_are_read_where_they_lie(window):
    inputs = random_inputs(100, 400, 8, 2, 16)
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    kernel = Watched()
    blocks = attention_blocks.attention_blocks(100, 400, window=window)
    options = {"blocks": blocks, "window": window, "scale": 0.25}
    o, lse = block_attention.forward(kernel, q, k, v, **options)
    block_attention.backward(
        kernel, do, q, k, v, o, lse, dk_TKD=k.clone(), dv_TKD=v.clone(), **options
    )
    own = (k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr())
    assert kernel.storages == [own] * (2 * len(blocks))


def test_a_long_prefix_is_never_repeated_for_the_group():
    """16 query heads on one key head: everything allocated is far below repeated K and V."""
    inputs = random_inputs(16, 4096, 16, 1, 64, dtype=torch.float32)
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    o, lse = attention_forward(q, k, v)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    repeated = 2 * 16 * k.numel() * 4
    forward = allocated_bytes(lambda: attention_forward(q, k, v))
    backward = allocated_bytes(
        lambda: attention_backward(do, q, k, v, o, lse, dk_TKD=dk, dv_TKD=dv)
    )
    assert 0 < forward < repeated / 4
    assert 0 < backward < repeated / 3  # one dK and dV of their own, per key head


def temporaries(prefix):
    """Bytes that forward and backward of 256 queries behind ``prefix`` tokens take at once."""
    inputs = random_inputs(256, prefix + 256, 1, 1, 64, dtype=torch.float32)
    q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
    o, lse = attention_forward(q, k, v)
    totals = {"dk_TKD": torch.zeros_like(k), "dv_TKD": torch.zeros_like(v)}
    forward = peak_bytes(lambda: attention_forward(q, k, v))
    return forward, peak_bytes(lambda: attention_backward(do, q, k, v, o, lse, **totals))


def test_temporaries_do_not_grow_with_the_prefix():
    """Scores of 256 queries and 8Ki keys would take 8 MiB, those of 32Ki keys 32 MiB."""
    forward, backward = temporaries(8192)
    assert forward < MIB
    assert backward < 10 * MIB  # dK and dV of 8Ki keys, twice over
    assert temporaries(32_768) == (forward, backward)


def test_shapes_that_do_not_fit_are_refused():
    x = random_inputs(4, 8, 4, 3, 6)
    with pytest.raises(ValueError, match="heads must be a multiple of key/value heads"):
        attention_forward(x["q"], x["k"], x["v"])
    y = random_inputs(4, 8, 4, 2, 6)
    with pytest.raises(ValueError, match="shapes equal"):
        attention_forward(y["q"], y["k"], y["v"][:7])
