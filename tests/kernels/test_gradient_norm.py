"""Sums of squares of gradients: exact, and without a copy of them."""

import math

import pytest
import torch

from sppo.kernels import gradient_norm
from sppo.kernels.gradient_norm import sum_of_squares
from tests.kernels.allocations import peak_bytes

SHAPES = [[(3, 5)], [(7,), (), (0, 4), (200, 700)], [(1, 1 << 16), (1 << 16, 1), (3, 1)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_sum_is_exact_in_float64(shapes, dtype):
    tensors = [10 ** (4 * torch.randn(shape)).to(dtype) for shape in shapes]
    expected = math.fsum(x * x for t in tensors for x in t.double().flatten().tolist())
    found = sum_of_squares(tensors)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert float(found) == pytest.approx(expected, rel=1e-14)


def test_rows_of_a_parameter_count_and_the_others_do_not():
    rows = torch.arange(24.0).view(6, 4)[2:5]
    assert float(sum_of_squares([rows])) == float((rows**2).sum())
    assert float(sum_of_squares([torch.empty(0, 4)])) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_anywhere_shows(bad):
    gradient = torch.zeros(3 * gradient_norm._CPU_CHUNK + 5)
    gradient[-1] = bad
    assert not torch.isfinite(sum_of_squares([torch.ones(4), gradient]))


def test_no_copy_of_the_gradients_is_made():
    gradients = [torch.ones(1 << 20), torch.ones(1 << 19)]
    assert peak_bytes(lambda: sum_of_squares(gradients)) < 9 * gradient_norm._CPU_CHUNK
