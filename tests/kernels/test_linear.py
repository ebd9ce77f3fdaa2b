"""Weight gradients: half-precision operands, fp32 sums, no large product in between."""

import pytest
import torch

from sppo.cost import tiles
from sppo.kernels.elementwise import accumulation_dtype
from sppo.kernels.linear import accumulate_bias_gradient, accumulate_weight_gradient
from sppo.units import MIB
from tests.kernels.allocations import peak_bytes
from tests.kernels.places import DEVICES

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def operands(tokens, outputs, inputs, *, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = ((outputs, inputs), (tokens, outputs), (tokens, inputs))
    total, dy, x = (torch.randn(shape, generator=generator) for shape in shapes)
    return total.to(device, accumulation_dtype(dtype)), dy.to(device, dtype), x.to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(50, 23, 7), (1, 1, 1), (33, 64, 129)])
def test_they_are_exact_but_for_rounding(shape, dtype, device, monkeypatch):
    """A CPU's product is rounded once to its operands' dtype, a GPU's not at all."""
    monkeypatch.setattr(tiles, "LEAST_PRODUCT_ROWS", 10)
    monkeypatch.setattr(tiles, "PRODUCT_TILE_BYTES", 0)
    total, dy, x = operands(*shape, dtype=dtype, device=device)
    product = dy.double().T @ x.double()
    expected = total.double() + product
    accumulate_weight_gradient(total, dy, x)
    roundoff = 4 * torch.finfo(total.dtype).eps
    if device == "cpu" and dtype not in (torch.float32, torch.float64):
        roundoff = torch.finfo(dtype).eps / 2
    error = (total.double() - expected).norm()
    assert error <= roundoff * product.norm() + torch.finfo(total.dtype).eps * expected.norm()
    bias = torch.zeros_like(total[:, 0])
    accumulate_bias_gradient(bias, dy)
    torch.testing.assert_close(bias.double(), dy.double().sum(0), rtol=1e-5, atol=1e-5)


def test_many_small_bf16_gradients_are_not_lost():
    """512 subsequences of gradient 2^-9 on top of one: a sum in bf16 would stay at one."""
    total, x = torch.ones(1, 1), torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16)
    for _ in range(512):
        accumulate_weight_gradient(total, torch.ones_like(x), x)
    assert total.item() == 2.0


def test_columns_between_others_are_read_where_they_lie():
    """As the heads of a projection that ranks share."""
    total, dy, x = operands(40, 30, 11, dtype=torch.bfloat16)
    whole = total.clone()
    accumulate_weight_gradient(whole, dy, x)
    for rows in (slice(0, 7), slice(7, 30)):
        accumulate_weight_gradient(total[rows], dy[:, rows], x)
    torch.testing.assert_close(total, whole, rtol=0, atol=0.02)


def test_the_product_of_a_large_weight_is_never_whole():
    """A projection of 64 MiB in bf16: a tile of the product, its cast, and what oneDNN takes."""
    dy, x = (torch.zeros(8, width, dtype=torch.bfloat16) for width in (32_768, 1024))
    total = torch.zeros(32_768, 1024)
    assert peak_bytes(lambda: accumulate_weight_gradient(total, dy, x)) < 4 * MIB
