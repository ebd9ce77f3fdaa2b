"""Norms and sums of squares of gradients, and clipping."""

import math

import pytest
import torch

from sppo.optim import gradient_norm
from sppo.optim.gradient_norm import clip_, global_norm, second_largest, sum_of_squares
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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_anywhere_shows(bad):
    gradient = torch.zeros(3 * gradient_norm._CPU_CHUNK + 5)
    gradient[-1] = bad
    assert not torch.isfinite(sum_of_squares([torch.ones(4), gradient]))


def test_no_copy_of_the_gradients_is_made():
    gradients = [torch.ones(1 << 20), torch.ones(1 << 19)]
    assert peak_bytes(lambda: sum_of_squares(gradients)) < 9 * gradient_norm._CPU_CHUNK
    assert peak_bytes(lambda: second_largest(gradients[0])) < 9 * gradient_norm._CPU_CHUNK


def test_the_second_largest_is_found_in_any_chunk():
    gradient = torch.zeros(3, gradient_norm._CPU_CHUNK)
    assert second_largest(gradient[0, :1]) == second_largest(gradient) == 0
    gradient[0, 5], gradient[2, 7] = -4, 9
    assert second_largest(gradient) == 4
    gradient[2, 8] = -8
    assert second_largest(gradient) == 8


@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_norm_of_all_and_their_scaling(one_by_one):
    tensors = [torch.randn(3, 5), torch.randn(0, 4), torch.randn(()), torch.randn(700, 20)[:, 3:9]]
    named = {str(index): tensor for index, tensor in enumerate(tensors)}
    read, scaled = [], []
    exact = torch.cat([x.double().flatten() for x in tensors])
    norm = global_norm(named, after_each=(lambda: read.append(1)) if one_by_one else None)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert float(norm) == pytest.approx(float(exact.norm()), rel=1e-5)
    expected = [0.25 * x for x in tensors]
    clip_(
        named,
        norm=torch.tensor(4.0 - 1e-6),
        clip_norm=1.0,
        after_each=(lambda: scaled.append(1)) if one_by_one else None,
    )
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    assert len(read) == len(scaled) == 4 * one_by_one
