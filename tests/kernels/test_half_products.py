"""Half-precision products by casts to fp32, for CPUs that multiply in fp32 only."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.kernels import half_products, linear
from sppo.kernels.linear import (
    accumulate_weight_gradient,
    add_product_,
    input_gradient,
)
from tests.kernels.allocations import peak_bytes

HALF = (torch.bfloat16, torch.float16)
SIZES = st.sampled_from([1, 2, 7, 8, 9, 20])


@pytest.fixture(autouse=True)
def a_cpu_without_half_products(monkeypatch):
    monkeypatch.setattr(half_products, "cpu_multiplies", lambda dtype: dtype not in HALF)


def rounded_once(exact, like):
    """How far a value that was rounded once may be from the exact one, sums of fp32 allowed for."""
    return torch.finfo(like.dtype).eps / 2 * exact.abs() + 1e-5 * (1 + exact.abs())


@given(SIZES, SIZES, SIZES, st.sampled_from(HALF), st.booleans(), st.integers(0, 99))
@settings(max_examples=60)
def test_every_product_of_a_linear_layer_is_rounded_once(
    tokens, outputs, inputs, dtype, biased, seed
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_products, "CAST_TILE", 8)
        dice = torch.Generator().manual_seed(seed)
        x, weight, dy, bias, total, dx = (
            torch.randn(shape, generator=dice)
            for shape in (
                (tokens, inputs),
                (outputs, inputs),
                (tokens, outputs),
                (outputs,),
                (outputs, inputs),
                (tokens, inputs),
            )
        )
        x, weight, dy, bias, dx = (tensor.to(dtype) for tensor in (x, weight, dy, bias, dx))

        exact = x.double() @ weight.double().t() + (bias.double() if biased else 0)
        y = linear.linear(x, weight, bias if biased else None)
        assert y.dtype is dtype
        assert ((y.double() - exact).abs() <= rounded_once(exact, y)).all()

        exact = dy.double() @ weight.double()
        found = input_gradient(dy, weight)
        assert ((found.double() - exact).abs() <= rounded_once(exact, found)).all()
        into = torch.empty_like(found)
        assert input_gradient(dy, weight, into_CI=into) is into
        assert torch.equal(into, found)

        exact += dx.double()
        add_product_(dx, dy, weight)
        assert ((dx.double() - exact).abs() <= rounded_once(exact, dx)).all()

        exact = total.double() + dy.double().t() @ x.double()
        accumulate_weight_gradient(total, dy, x)
        assert torch.allclose(total.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_product_takes_a_few_tiles_beside_its_result():
    x, weight = (torch.ones(n, 1000, dtype=torch.bfloat16) for n in (900, 2000))
    tile_bytes = 4 * half_products.CAST_TILE**2
    assert peak_bytes(lambda: linear.linear(x, weight)) <= 900 * 2000 * 2 + 3 * tile_bytes


def test_this_cpu_says_what_it_multiplies(monkeypatch):
    monkeypatch.undo()
    half_products.cpu_multiplies.cache_clear()
    expected = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert half_products.needs_casts(torch.zeros(1, dtype=torch.bfloat16)) is not expected
    assert not half_products.needs_casts(torch.zeros(1))
