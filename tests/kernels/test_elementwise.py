"""Norms, activations, rotary turns and weight sums against autograd in float64.

1e-12 of the largest value: a handful of operations on rows of at most a hundred numbers. In bf16
the result is one rounding away (2^-8 of each value) from what fp32 arithmetic gives.
"""

import pytest
import torch
from torch.nn import functional

from sppo.kernels import elementwise, linear, row_tiles
from sppo.kernels.rotary import RotaryTable, rotate, rotate_backward

SHAPES = [(1, 7), (5, 24), (13, 2), (4, 3, 10)]


def random(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def close(actual, expected, *, tolerance=1e-12):
    scale = max(float(expected.abs().max()), 1e-3)
    assert actual.shape == expected.shape
    assert float((actual.double() - expected).abs().max()) <= tolerance * scale


def by_autograd(function, inputs, dy):
    leaves = [x.double().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return y.detach(), torch.autograd.grad(y, leaves, dy.double())


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def centred(x, weight, bias):
    x = x - x.mean(-1, keepdim=True)
    return rms(x, weight) + bias


NORMS = {"rms": rms, "layer": centred}
each_norm = pytest.mark.parametrize("name", NORMS)


def parameters_of(name, size, *, dtype=torch.float64, seed=2):
    """Weight, and bias where the norm has one."""
    return random((size,), (size,), seed=seed, dtype=dtype)[: 1 if name == "rms" else 2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "size"), [("rms", 1e-3), ("rms", 1e3), ("layer", 1.0)])
def test_norms(name, size, shape):
    x, dy = random(shape, shape)
    x = x * size + 3 * (name == "layer")
    parameters = parameters_of(name, shape[-1])
    y, expected = by_autograd(NORMS[name], (x, *parameters), dy)
    close(elementwise.norm(x, *parameters, eps=1e-5), y)
    ours = elementwise.norm_backward(dy, x, *parameters, eps=1e-5)
    for actual, gradient in zip(ours, (*expected, None), strict=False):
        if actual is not None:
            close(actual, gradient, tolerance=1e-10)  # two columns nearly cancel


@pytest.mark.parametrize("shape", [(5, 24), (4, 3, 10)])
@each_norm
def test_a_residual_before_a_norm_and_around_it(name, shape):
    """y = norm(h) and h itself, with h = a + b: what autograd finds for h is what reaches both."""
    a, b, dy, dresidual = random(shape, shape, shape, shape)
    parameters = parameters_of(name, shape[-1])
    y, expected = by_autograd(NORMS[name], (a + b, *parameters), dy)
    total, before = a.clone(), dresidual.clone()
    close(elementwise.add_norm_(total, b, *parameters, eps=1e-5), y)
    assert torch.equal(total, a + b)
    dx, *_sums = elementwise.norm_backward(dy, total, *parameters, eps=1e-5, dresidual_CE=dresidual)
    close(dx, expected[0] + dresidual, tolerance=1e-11)
    assert torch.equal(dresidual, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_norm
def test_a_norm_of_the_saved_sum_has_the_bits_of_the_norm_beside_the_addition(
    name, dtype, monkeypatch
):
    a, b = random((70, 96), (70, 96), dtype=dtype)
    parameters = parameters_of(name, 96, dtype=dtype)
    for tile_bytes in (row_tiles.TILE_BYTES, 4 * 96 * 9):
        monkeypatch.setattr(row_tiles, "TILE_BYTES", tile_bytes)
        total = a.clone()
        normed = elementwise.add_norm_(total, b, *parameters, eps=1e-5)
        assert torch.equal(total, a + b)
        assert torch.equal(normed, elementwise.norm(total, *parameters, eps=1e-5))


@each_norm
def test_norms_in_bf16_compute_in_fp32(name):
    """The residual's gradient is added before rounding: one rounding to bf16, not two."""
    x, dy, dresidual = random((33, 96), (33, 96), (33, 96), seed=1, dtype=torch.bfloat16)
    parameters = parameters_of(name, 96, dtype=torch.bfloat16)
    y, expected = by_autograd(NORMS[name], (x, *parameters), dy)
    ours = elementwise.norm(x, *parameters, eps=1e-5)
    close(ours, y, tolerance=2**-7)  # RMSNorm rounds before and after the weight
    dx, *sums = elementwise.norm_backward(dy, x, *parameters, eps=1e-5, dresidual_CE=dresidual)
    assert ours.dtype is dx.dtype is torch.bfloat16
    total = expected[0] + dresidual.double()
    assert float(((dx.double() - total).abs() - 2**-8 * total.abs()).max()) <= 1e-5
    for actual, gradient in zip(sums, expected[1:], strict=False):
        assert actual.dtype is torch.float32
        close(actual, gradient, tolerance=1e-5)


def plain_activation(kind):
    if kind == "swiglu":
        return lambda gate, up: gate * torch.sigmoid(gate) * up
    return lambda up: functional.gelu(up, approximate="tanh" if kind == "gelu_tanh" else "none")


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "gelu_tanh"])
def test_activations(kind):
    gate, up, dy = (3 * x for x in random((6, 11), (6, 11), (6, 11)))
    inputs = (gate, up) if kind == "swiglu" else (up,)
    y, expected = by_autograd(plain_activation(kind), inputs, dy)
    gate = gate if kind == "swiglu" else None
    close(elementwise.activation(gate, up, kind=kind), y)
    ours = elementwise.activation_backward_(dy, gate, up, kind=kind)
    close(ours.hidden_CF, y)
    close(ours.dup_CF, expected[-1])
    if kind == "swiglu":
        close(ours.dgate_CF, expected[0])
    else:
        assert ours.dgate_CF is None
    assert (ours.hidden_CF is up, ours.dgate_CF is gate, ours.dup_CF is dy) == (True,) * 3


@pytest.mark.parametrize("kind", ["swiglu", "gelu_tanh"])
def test_tiles_of_rows_make_no_difference(kind, monkeypatch):
    def everything():
        x, dy, up, dup = random((70, 96), (70, 96), (70, 40), (70, 40), dtype=torch.bfloat16)
        gate = up.flip(0).clone() if kind == "swiglu" else None
        (weight,) = random((96,), dtype=torch.bfloat16)
        table = angles(70, 8)
        inner = elementwise.activation_backward_(dup, gate, up, kind=kind)
        return [
            elementwise.norm(x, weight, eps=1e-5),
            *elementwise.norm_backward(dy, x, weight, eps=1e-5)[:2],
            *elementwise.norm_backward(dy, x, weight, weight, eps=1e-5),
            rotate(x.view(70, 12, 8), RotaryTable(table.cos.float(), table.sin.float())),
            *(t for t in (inner.hidden_CF, inner.dgate_CF, inner.dup_CF) if t is not None),
        ]

    whole = everything()
    monkeypatch.setattr(row_tiles, "TILE_BYTES", 4 * 96 * 9)  # 9 rows, 7 in the last
    assert len([*row_tiles.row_tiles(torch.empty(70, 96))]) == 8
    for one, tiled in zip(whole, everything(), strict=True):
        if one.dtype == torch.bfloat16:
            assert torch.equal(one, tiled)
        else:  # sums over all rows
            torch.testing.assert_close(one, tiled, rtol=1e-5, atol=1e-5)


def angles(c, d, seed=3):
    (x,) = random((c, 1, d // 2), seed=seed)
    return RotaryTable(1.3 * (4 * x).cos(), 1.3 * (4 * x).sin())


def by_matrices(x, table):
    """Every pair (i, i + D/2) times its own 2x2 matrix."""
    half = x.shape[-1] // 2
    turns = torch.stack([table.cos, -table.sin, table.sin, table.cos], -1)
    turns = turns.unflatten(-1, (2, 2)).expand(*x.shape[:2], half, 2, 2)
    pairs = torch.stack([x[..., :half], x[..., half:]], -1)
    turned = torch.einsum("chpij,chpj->chpi", turns, pairs)
    return torch.cat([turned[..., 0], turned[..., 1]], -1)


@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 10), (5, 2, 64)])
def test_rotary(shape):
    x, dy = random(shape, shape)
    table = angles(shape[0], shape[2])
    y, (dx,) = by_autograd(lambda x: by_matrices(x, table), (x,), dy)
    close(rotate(x, table), y)
    close(rotate_backward(dy, table), dx)


def test_rotary_of_bf16_is_fp32_rounded_once():
    (x,) = random((9, 2, 16), dtype=torch.bfloat16)
    table = angles(9, 16)
    narrow = RotaryTable(table.cos.float(), table.sin.float())
    y = rotate(x, narrow)
    assert y.dtype is torch.bfloat16
    close(y, by_matrices(x.double(), table), tolerance=2**-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_in_the_accumulator(dtype):
    x, dy = random((50, 6), (50, 9), dtype=dtype)
    acc_dtype = elementwise.accumulation_dtype(dtype)
    weight0, bias0 = random((9, 6), (9,), seed=7, dtype=acc_dtype)
    weight, bias = weight0.clone(), bias0.clone()
    linear.accumulate_weight_gradient(weight, dy, x)
    linear.accumulate_bias_gradient(bias, dy)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    close(weight - weight0, dy.double().T @ x.double(), tolerance=tolerance)
    bias_tolerance = 1e-13 if dtype is torch.float64 else 1e-6
    close(bias - bias0, dy.double().sum(0), tolerance=bias_tolerance)


def test_many_small_bf16_gradients_are_not_lost():
    """512 subsequences of gradient 2^-9 on top of one: a sum in bf16 would stay at one."""
    total = torch.ones(1, 1)
    x = torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16)
    for _ in range(512):
        linear.accumulate_weight_gradient(total, torch.ones_like(x), x)
    assert total.item() == 2.0
