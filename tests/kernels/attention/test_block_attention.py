"""Attention composed of flash blocks: any span, heads, window and documents; memory and threads.

float64 has to agree to 1e-11 of the largest value: scores of a thousand times a thousand cancel to
nearly nothing behind a peaked softmax. bf16 keeps 8 bits: its unit roundoff, u = 2^-8, is what one
rounding of the result may cost; the kernel rounds its weights too. Random inputs measure 0.75 u
forward and 1.1 u backward in relative Frobenius norm; the bounds are 1 u and 2 u.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.kernels.attention import block_attention, cpu_flash
from sppo.kernels.attention import blocks as attention_blocks
from sppo.kernels.attention.block_attention import BlockAttention
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import KERNELS
from sppo.units import MIB
from tests.kernels.allocations import allocated_bytes, peak_bytes
from tests.kernels.attention.reference import Definition, computed, exactly, spans
from tests.tiers import default_of, examples

BF16_ROUNDOFF = 2.0**-8
FLASH = KERNELS["cpu_flash"]


def problem(c, t, n, k, d, *, seed=0, dtype=torch.float64, scale=1.0, **options):
    """(call, do)."""
    generator = torch.Generator().manual_seed(seed)
    q, keys, values, do = (
        torch.randn(shape, generator=generator)
        for shape in ((c, n, d), (t, k, d), (t, k, d), (c, n, d))
    )
    operands = (x.to(dtype) for x in (q * scale, keys, values))
    return AttentionCall(*operands, **options), do.to(dtype)


def assert_exact_in_float64(call, do):
    ours = computed(FLASH, call, do)
    assert all(value.dtype is torch.float64 for value in ours.values())
    for name, value in computed(Definition(), call, do).items():
        error = (ours[name] - value).abs().max()
        bound = 1e-11 * max(float(value.abs().max()), 1.0)
        assert error <= bound, f"{name}: {float(error):.2e} above {bound:.2e}"


def assert_within_rounding(call, do):
    ours = computed(FLASH, call, do)
    half, wide = torch.bfloat16, torch.float32
    assert [value.dtype for value in ours.values()] == [half, wide, half, wide, wide]
    exact = computed(Definition(), exactly(call), do.double())
    bounds = {"o": BF16_ROUNDOFF, "lse": 1e-5}  # lse is kept in fp32
    for name, value in exact.items():
        error = float((ours[name].double() - value).norm() / value.norm())
        assert error <= bounds.get(name, 2 * BF16_ROUNDOFF), f"{name}: {error:.2e}"


@st.composite
def cases(draw):
    span = draw(spans(60))
    queries, keys = span.pop("num_queries"), span.pop("num_keys")
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 8))
    call, do = problem(
        *(queries, keys, heads, kv_heads, draw(st.sampled_from((2, 6, 10, 32)))),
        seed=draw(st.integers(0, 1000)),
        scale=draw(st.sampled_from((0.0, 1.0, 30.0))),
        **span,
    )
    return replace(call, scale=draw(st.none() | st.just(0.3))), do


@settings(deadline=None, max_examples=examples(30, all=70))
@given(cases(), *[st.integers(1, 40)] * 3)
def test_any_span_equals_its_definition(case, causal, band, full):
    limits = {"MAX_CAUSAL_TOKENS": causal, "BAND_TILE_TOKENS": band, "MAX_FULL_KEYS": full}
    uncached = attention_blocks.attention_blocks.__wrapped__
    with (
        mock.patch.multiple(attention_blocks, **limits),
        mock.patch.object(block_attention, "attention_blocks", uncached),
    ):
        assert_exact_in_float64(*case)


ROUNDED = {
    "long prefix": ((300, 900, 8, 2, 64), {}),
    "odd": ((301, 901, 6, 3, 128), {}),
    "one key head": ((257, 1500, 8, 1, 64), {}),
    "window": ((900, 900, 4, 4, 96), {"window": 100}),
    "documents": ((500, 900, 4, 2, 32), {"document_starts": (0, 250, 650, 700)}),
    "halved squares": ((2250, 2250, 2, 1, 64), {}),
    "window in documents": (
        (549, 1291, 8, 2, 64),
        {"window": 300, "document_starts": (0, 130, 700, 891)},
    ),
}


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("case", default_of(ROUNDED, "odd", "window in documents"))
def test_bf16_stays_within_its_rounding(monkeypatch, case, multiplies):
    """Whether or not the CPU multiplies in half precision: blocks of odd shapes never are."""
    monkeypatch.setattr(cpu_flash, "cpu_multiplies", lambda _dtype: multiplies)
    shape, options = ROUNDED[case]
    assert_within_rounding(*problem(*shape, dtype=torch.bfloat16, **options))


@pytest.fixture(params=[2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_few_heads_split_keys_over_threads(threads, kv_heads):
    """1771 prefix keys: three parts at most, and a rest of one that fits none."""
    spy = mock.Mock(wraps=cpu_flash._backward_in_parts)
    with mock.patch.object(cpu_flash, "_backward_in_parts", spy):
        assert_exact_in_float64(*problem(60, 1831, 4 * kv_heads, kv_heads, 16))
    splits = threads % kv_heads != 0 or kv_heads == 1
    assert [call.kwargs["parts"] for call in spy.call_args_list] == ([threads] if splits else [])


def test_few_heads_in_bf16_keep_their_accuracy(threads):
    assert_within_rounding(*problem(60, 1831, 4, 1, 64, dtype=torch.bfloat16))


class Watched(cpu_flash.CpuFlash):
    """Notes which storages the kernel is handed."""

    def __init__(self):
        self.storages = []

    def forward(self, call):
        self._note(call)
        return super().forward(call)

    def backward(self, call, *others):
        self._note(call)
        return super().backward(call, *others)

    def _note(self, call):
        self.storages.append([x.untyped_storage().data_ptr() for x in (call.k, call.v)])


@pytest.mark.parametrize("window", [None, 50])
def test_keys_and_values_are_read_where_they_lie(window):
    call, do = problem(100, 400, 8, 2, 16, window=window)
    kernel = Watched()
    computed(BlockAttention(kernel), call, do)
    own = [x.untyped_storage().data_ptr() for x in (call.k_TKD, call.v_TKD)]
    assert kernel.storages == [own] * len(kernel.storages)
    assert kernel.storages


def backward_of(call, do):
    """A backward as a function to call."""
    o, lse = FLASH.forward(call)
    dk, dv = (torch.zeros_like(x) for x in (call.k_TKD, call.v_TKD))
    return lambda: FLASH.backward(call, do, o, lse, dk_TKD=dk, dv_TKD=dv)


def test_a_long_prefix_is_never_repeated_for_the_group():
    """16 query heads on one key head: everything allocated is far below repeated K and V."""
    call, do = problem(16, 4096, 16, 1, 64, dtype=torch.float32)
    repeated = 2 * 16 * call.k_TKD.numel() * 4
    assert 0 < allocated_bytes(lambda: FLASH.forward(call)) < repeated / 4
    # One dK and dV of their own, per key head.
    assert 0 < allocated_bytes(backward_of(call, do)) < repeated / 3


def temporaries(prefix):
    """Bytes that forward and backward of 256 queries behind ``prefix`` tokens take at once."""
    call, do = problem(256, prefix + 256, 1, 1, 64, dtype=torch.float32)
    return peak_bytes(lambda: FLASH.forward(call)), peak_bytes(backward_of(call, do))


def test_temporaries_do_not_grow_with_the_prefix():
    """Scores of 256 queries and 8Ki keys would take 8 MiB, those of 32Ki keys 32 MiB."""
    forward, backward = temporaries(8192)
    assert forward < MIB
    assert backward < 10 * MIB  # dK and dV of 8Ki keys, twice over
    assert temporaries(32_768) == (forward, backward)
