"""Rates by shape: exact at measured points, sensible between and beyond them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sppo.hardware.presets import PRESETS
from sppo.hardware.rates import (
    AttentionPoint,
    ElementwisePoint,
    GemmPoint,
    PublishedAttention,
    attention_blocks,
    gemm_blocks,
    published_rates,
    typical_keys,
    wave_fill,
)

CPU = PRESETS["laptop-cpu"].device
GEMM = tuple(
    GemmPoint("bf16", tokens, width, 1e9 * tokens * width, 2e9 * tokens * width, 5e8 * tokens)
    for tokens in (256, 1024)
    for width in (128, 512)
)
ATTENTION = tuple(
    AttentionPoint("bf16", size, queries, queries * prefix, 1e9 * size * prefix, 1e9 * queries)
    for size in (64, 128)
    for queries in (256, 1024)
    for prefix in (1, 4)
)
ELEMENTWISE = tuple(
    ElementwisePoint("swiglu", "bf16", elements, float(elements)) for elements in (1 << 10, 1 << 14)
)
MEASURED = replace(
    CPU, gemm_points=GEMM, attention_points=ATTENTION, elementwise_points=ELEMENTWISE
)


def array(*values):
    return np.array(values, dtype=np.float64)


def attention(queries, keys, *, head_size=64, backward=False):
    return MEASURED.attention_flops_per_s(
        "bf16",
        queries=array(*queries),
        keys=array(*keys),
        heads=4,
        head_size=head_size,
        backward=backward,
    )


@pytest.mark.parametrize("point", GEMM)
def test_measured_products_are_given_back(point):
    for product, rate in (
        ("forward", point.forward_flops_per_s),
        ("input", point.input_flops_per_s),
        ("weight", point.weight_flops_per_s),
    ):
        found = MEASURED.gemm_flops_per_s(
            "bf16", tokens=array(point.tokens), width=point.width, product=product
        )
        assert found == pytest.approx(rate)


def test_between_points_power_laws_hold_exactly():
    """Interpolation is linear in logarithms, so c * tokens^a * width^b is met everywhere."""
    found = MEASURED.gemm_flops_per_s("bf16", tokens=array(300, 512, 999), width=200.0)
    assert found == pytest.approx(1e9 * array(300, 512, 999) * 200)


def test_beyond_the_points_the_nearest_holds():
    far = MEASURED.gemm_flops_per_s("bf16", tokens=array(1, 10**7), width=1e6)
    assert far == pytest.approx(1e9 * array(256, 1024) * 512)


def test_attention_is_looked_up_by_keys_per_query():
    assert attention((512, 512), (1024, 10**6)) == pytest.approx(1e9 * 64 * array(2, 4))
    assert attention((512,), (1024,), backward=True) == pytest.approx(1e9 * 512)


@pytest.mark.parametrize(
    ("prefix", "queries", "part"), [(0, 4096, 1024), (3000, 2048, 256), (5000, 700, 700)]
)
def test_parts_of_a_span_count_by_their_pairs(prefix, queries, part):
    ends = np.arange(prefix + part, prefix + queries + 1, part)
    pairs = ends - part / 2
    found = typical_keys(array(queries), keys=array(prefix + queries), part=array(part))
    assert found == pytest.approx((ends * pairs).sum() / pairs.sum())


def test_a_span_longer_than_any_measured_runs_as_its_parts_do():
    found = attention((4096,), (4096,))
    assert found == pytest.approx(attention((1024,), (3200,)))
    assert found == pytest.approx(1e9 * 64 * 3200 / 1024)


def test_a_span_shorter_than_any_measured_runs_as_the_shortest_over_its_keys():
    assert attention((1, 64), (1, 512)) == pytest.approx(1e9 * 64 * array(1, 2))


@pytest.mark.parametrize(("size", "met"), [(32, 64), (64, 64), (96, 96), (128, 128), (256, 128)])
def test_attention_lies_between_the_nearest_head_sizes(size, met):
    assert attention((256,), (256,), head_size=size) == pytest.approx(1e9 * met)


def test_elementwise_kernels_have_rates_of_their_own():
    found = MEASURED.elementwise_bytes_per_s("swiglu", "bf16", elements=array(1, 1 << 12, 1 << 20))
    assert found == pytest.approx(array(1 << 10, 1 << 12, 1 << 14))
    for kernel, dtype in (("rotary", "bf16"), ("swiglu", "fp32")):
        other = MEASURED.elementwise_bytes_per_s(kernel, dtype, elements=array(4096))
        assert other == pytest.approx(CPU.memory_bytes_per_s)


def test_what_was_not_measured_is_analytic():
    assert not CPU.measured_gemm("bf16")
    assert MEASURED.measured_gemm("bf16")
    assert not MEASURED.measured_gemm("fp32")
    tokens = array(100, 4096)
    for product in ("forward", "input", "weight"):
        assert (
            MEASURED.gemm_flops_per_s("fp32", tokens=tokens, width=512, product=product)
            == CPU.gemm_flops_per_s("fp32", tokens=tokens, width=512)
        ).all()
    assert (
        MEASURED.attention_flops_per_s("fp32", queries=tokens, keys=tokens, heads=2)
        == CPU.attention_flops_per_s("fp32", queries=tokens, keys=tokens, heads=2)
    ).all()


def test_a_hole_in_a_grid_is_named():
    with pytest.raises(ValueError, match="bf16: nothing measured at tokens 256, width 512; a grid"):
        replace(CPU, gemm_points=GEMM[:1] + GEMM[2:])
    with pytest.raises(ValueError, match="head size 64: nothing measured at queries 256, keys per"):
        replace(CPU, attention_points=ATTENTION[:1] + ATTENTION[2:])


def test_waves_fill_from_nothing_to_all():
    fill = wave_fill(array(1, 66, 10**9), num_multiprocessors=132)
    assert fill == pytest.approx(array(1 / 67, 0.5, 1), rel=1e-6)
    assert gemm_blocks(array(1, 128, 129), outputs=300).tolist() == [3, 3, 6]
    assert attention_blocks(array(1, 129), heads=8).tolist() == [8, 16]


def test_short_subsequences_leave_only_the_forward_without_blocks():
    gpu = PRESETS["h100"].device
    rates = {
        backward: gpu.attention_flops_per_s(
            "bf16", queries=array(128), keys=array(65536), heads=4, backward=backward
        )[0]
        for backward in (False, True)
    }
    assert rates[False] < 0.1 * rates[True]
    assert all(math.isfinite(rate) for rate in rates.values())


PUBLISHED = (
    PublishedAttention("b", 64, (1024, 4096), (100.0, 400.0), (50.0, 200.0), "a paper"),
    PublishedAttention("b", 128, (1024, 4096), (400.0, 400.0), (200.0, 200.0), "a paper"),
)


def published(*, queries, keys, head_size=64, backward=False):
    grids = {row.head_size: row.grid(backward=backward) for row in PUBLISHED}
    return published_rates(grids, head_size=head_size, queries=array(queries), keys=array(keys))


def test_rates_between_lengths_and_head_sizes_are_interpolated_in_logarithms():
    assert published(queries=1024, keys=1024) == pytest.approx(100)
    assert published(queries=2048, keys=2048) == pytest.approx(200)
    assert published(queries=2048, keys=2048, backward=True) == pytest.approx(100)
    between = published(queries=2048, keys=2048, head_size=90.51)
    assert between == pytest.approx((200 * 400) ** 0.5, 1e-3)


def test_a_span_behind_a_prefix_counts_as_the_length_whose_queries_see_as_many_keys():
    # 512 queries up to key 1280 see 1024 on average, as those of 2048 tokens do.
    assert published(queries=512, keys=1280) == pytest.approx(200, rel=1e-3)


@pytest.mark.parametrize("change", [{"lengths": (2, 1)}, {"forward_flops_per_s": (1.0,)}])
def test_rows_that_make_no_sense_are_refused(change):
    with pytest.raises(ValueError, match="published_attention of b, head size 64"):
        replace(PUBLISHED[0], **change)
