"""Norms, activations, rotary turns and merges, in torch and in Triton, against autograd in float64.

How far results may be off: see :mod:`tests.kernels.operands`.
"""

import pytest
import torch
from torch.nn import functional

from sppo.kernels import elementwise, row_tiles
from sppo.kernels.attention.merged_output import MergedOutput
from sppo.kernels.norm_parameters import NormParameters
from sppo.kernels.rotary import RotaryTable, rotate, rotate_backward
from tests.kernels.operands import (
    DTYPES,
    TOLERANCE,
    Guarded,
    accumulation_tolerance,
    assert_close,
    dtype_name,
    exact,
    random,
)
from tests.tiers import each_once

SHAPES = [(1, 7), (37, 100), (5, 3, 64), (300, 33), (3, 4100)]
EPS = 1e-5
GATED = ["swiglu", "geglu_tanh", "swiglu_clamped"]
KINDS = [*GATED, "gelu", "gelu_tanh", "relu2"]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
each_norm = pytest.mark.parametrize("has_bias", [False, True], ids=["rms", "layer"])
pytestmark = pytest.mark.usefixtures("_fresh_memory_is_poisoned")


def by_autograd(function, inputs, dy):
    """The output and the gradients of some inputs, in float64."""
    leaves = [x.requires_grad_() for x in exact(*inputs)]
    y = function(*leaves)
    return y.detach(), torch.autograd.grad(y, leaves, *exact(dy))


def plain_norm(x, weight, bias=None):
    x = x if bias is None else x - x.mean(-1, keepdim=True)
    normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return normed if bias is None else normed + bias


def of(weight, bias=None, *, offset=False):
    """The parameters of a norm."""
    return NormParameters(weight, bias, EPS, offset)


def norm_operands(shape, *, has_bias, dtype, device):
    """(x, dy, dresidual, parameters)."""
    x, dy, dresidual, *parameters = random(
        *[shape] * 3, *[shape[-1:]] * (1 + has_bias), dtype=dtype, device=device
    )
    return x + 3 * has_bias, dy, dresidual, parameters


@each_norm
@pytest.mark.parametrize(("shape", "dtype"), each_once(SHAPES, DTYPES), ids=str)
def test_norms(shape, dtype, has_bias, device):
    x, dy, dresidual, parameters = norm_operands(
        shape, has_bias=has_bias, dtype=dtype, device=device
    )
    before = dresidual.clone()
    expected, gradients = by_autograd(plain_norm, (x, *parameters), dy)
    y = elementwise.norm(x, of(*parameters))
    dx, *sums = elementwise.norm_backward(dy, x, of(*parameters))
    assert y.dtype == dx.dtype == dtype
    room = 2 if dtype == torch.float32 else 1  # chains of sums, and the mean that is taken off
    assert_close(y, expected, tolerance=room * TOLERANCE[dtype])
    assert_close(dx, gradients[0], tolerance=room * TOLERANCE[dtype])
    assert (sums[1] is not None) == has_bias
    for total, exact_total in zip(sums, gradients[1:], strict=False):
        assert total.dtype == elementwise.accumulation_dtype(dtype)
        assert_close(total, exact_total, tolerance=2 * accumulation_tolerance(dtype))
    # A gradient around the norm is added before rounding, and changes no sum.
    dx, *same = elementwise.norm_backward(dy, x, of(*parameters), dresidual_CE=dresidual)
    assert_close(dx, gradients[0] + exact(dresidual)[0], tolerance=room * TOLERANCE[dtype])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(sums, same, strict=True))
    assert torch.equal(dresidual, before)
    frozen, *nothing = elementwise.norm_backward(
        dy, x, of(*parameters), dresidual_CE=dresidual, with_parameters=False
    )
    assert torch.equal(frozen, dx)
    assert nothing == [None, None]


@every_dtype
def test_a_norm_weight_that_is_an_offset_from_one(dtype, device):
    """It is added in the accumulation type: 1.001 is a number that halves do not have."""
    x, dy, total, weight = random(*[(61, 96)] * 3, (96,), dtype=dtype, device=device)
    weight *= 1e-3
    expected, (dx, dweight) = by_autograd(lambda x, w: plain_norm(x, 1 + w), (x, weight), dy)
    y = elementwise.norm(x, of(weight, offset=True))
    assert_close(y, expected, tolerance=TOLERANCE[dtype])
    if dtype == torch.float16:
        assert (y.cpu() != expected.to(dtype)).double().mean() <= 0.01
    ours = elementwise.norm_backward(dy, x, of(weight, offset=True))
    assert_close(ours[0], dx, tolerance=TOLERANCE[dtype])
    assert_close(ours[1], dweight, tolerance=2 * accumulation_tolerance(dtype))
    normed = elementwise.add_norm_(total, x, of(weight, offset=True))
    assert torch.equal(normed, elementwise.norm(total, of(weight, offset=True)))


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_rms_norm_of_small_and_large_rows(size, device):
    x, dy, weight = random((13, 1), (13, 1), (1,), dtype=torch.float64, device=device)
    y, (dx, _) = by_autograd(plain_norm, (size * x, weight), dy)
    assert_close(elementwise.norm(size * x, of(weight)), y, tolerance=1e-12)
    ours, _, _ = elementwise.norm_backward(dy, size * x, of(weight))
    # One column nearly cancels.
    assert float((ours.cpu() - dx).abs().max()) <= 1e-11 * max(float(dx.abs().max()), 1e-3)


@each_norm
@pytest.mark.parametrize(("shape", "dtype"), each_once(SHAPES, DTYPES), ids=str)
def test_an_addition_before_a_norm(shape, dtype, has_bias, device):
    """The norm is that of the sum as it was rounded, to the last bit."""
    total, x, _, parameters = norm_operands(shape, has_bias=has_bias, dtype=dtype, device=device)
    before, (expected,) = x.clone(), exact(total.double() + x.double())
    normed = elementwise.add_norm_(total, x, of(*parameters))
    assert (total.dtype, normed.dtype) == (dtype, dtype)
    assert_close(total, expected, tolerance=TOLERANCE[dtype])
    assert torch.equal(normed, elementwise.norm(total, of(*parameters)))
    assert torch.equal(x, before)


@each_norm
@every_dtype
def test_norms_keep_to_their_rows(dtype, has_bias, device):
    x, dy, dresidual, parameters = norm_operands(
        (9, 48), has_bias=has_bias, dtype=dtype, device=device
    )
    guarded = [Guarded(t) for t in (x, dy, dresidual)]
    around = Guarded(dy.view(1, -1))  # rows in place are contiguous
    ours, theirs = around.inside.view(9, 48), dy.clone()
    x_, dy_, dresidual_ = (g.inside for g in guarded)
    found = [elementwise.add_norm_(ours, x_, of(*parameters)), ours]
    dense = [elementwise.add_norm_(theirs, x, of(*parameters)), theirs]
    found += elementwise.norm_backward(dy_, x_, of(*parameters), dresidual_CE=dresidual_)
    dense += elementwise.norm_backward(dy, x, of(*parameters), dresidual_CE=dresidual)
    found.append(elementwise.norm(x_, of(*parameters)))
    dense.append(elementwise.norm(x, of(*parameters)))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, dense, strict=True))
    assert all(g.intact() for g in (*guarded, around))


def plain_activation(kind):
    if kind == "swiglu":
        return lambda gate, up: gate * torch.sigmoid(gate) * up
    if kind == "geglu_tanh":
        return lambda gate, up: functional.gelu(gate, approximate="tanh") * up
    if kind == "swiglu_clamped":
        return lambda gate, up: (
            gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
        )
    if kind == "relu2":
        return lambda up: up.clamp(min=0) ** 2
    return lambda up: functional.gelu(up, approximate="tanh" if kind == "gelu_tanh" else "none")


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (13, 333)], ids=str)
def test_activations(shape, kind, dtype, device):
    gate, up, dhidden = (3 * x for x in random(shape, shape, shape, dtype=dtype, device=device))
    gate = gate if kind in GATED else None
    inputs = [x for x in (gate, up) if x is not None]
    y, gradients = by_autograd(plain_activation(kind), inputs, dhidden)
    tolerance = 2 * TOLERANCE[dtype]
    assert_close(elementwise.activation(gate, up, kind=kind), y, tolerance=tolerance)
    ours = elementwise.activation_backward_(dhidden, gate, up, kind=kind)
    assert (ours.hidden_CF is up, ours.dgate_CF is gate, ours.dup_CF is dhidden) == (True,) * 3
    assert_close(ours.hidden_CF, y, tolerance=tolerance)
    assert_close(ours.dup_CF, gradients[-1], tolerance=tolerance)
    if gate is not None:
        assert_close(ours.dgate_CF, gradients[0], tolerance=tolerance)


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_activations_far_out(kind, dtype, device):
    up = torch.tensor([-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4], device=device).to(dtype)
    up = up.clamp(-90, 90) if kind == "relu2" else up  # whose square fp16 has
    gate = up.clone() if kind in GATED else None
    up = torch.ones_like(up) if kind in GATED else up
    expected = plain_activation(kind)(*exact(*(x for x in (gate, up) if x is not None)))
    hidden = elementwise.activation(gate, up, kind=kind)
    assert_close(hidden, expected, tolerance=2 * TOLERANCE[dtype])
    ours = elementwise.activation_backward_(torch.ones_like(up), gate, up, kind=kind)
    results = (ours.hidden_CF, ours.dgate_CF, ours.dup_CF)
    assert all(bool(torch.isfinite(x).all()) for x in results if x is not None)


def by_matrices(x, table):
    """Every pair (i, i + P) times its own 2x2 matrix, and the rest of a head as it is."""
    half = table.cos.shape[-1]
    turns = torch.stack([table.cos, -table.sin, table.sin, table.cos], -1)
    turns = turns.unflatten(-1, (2, 2)).expand(*x.shape[:2], half, 2, 2)
    pairs = torch.stack([x[..., :half], x[..., half : 2 * half]], -1)
    turned = torch.einsum("chpij,chpj->chpi", turns, pairs)
    return torch.cat([turned[..., 0], turned[..., 1], x[..., 2 * half :]], -1)


@pytest.mark.parametrize(
    ("rotated", "dtype"),
    each_once(
        [((1, 1, 2), 1), ((7, 3, 10), 5), ((13, 5, 96), 36), ((13, 5, 96), 1), ((3, 33, 64), 32)],
        DTYPES,
    ),
    ids=str,
)
def test_rotary(rotated, dtype, device):
    shape, pairs = rotated
    acc_dtype = elementwise.accumulation_dtype(dtype)
    x, dy = random(*[(*shape[:2], 2 * shape[2])] * 2, dtype=dtype, device=device)
    x, dy = x[:, :, : shape[2]], dy[:, :, : shape[2]]
    (angle,) = random((shape[0], 1, pairs), dtype=acc_dtype, device=device, seed=1)
    table = RotaryTable(1.3 * angle.cos(), 1.3 * angle.sin())
    exact_table = RotaryTable(*exact(table.cos, table.sin))
    y, (dx,) = by_autograd(lambda x: by_matrices(x, exact_table), (x,), dy)
    for ours, expected in ((rotate(x, table), y), (rotate_backward(dy, table), dx)):
        assert ours.dtype == dtype
        assert_close(ours, expected, tolerance=TOLERANCE[dtype])


@every_dtype
def test_merge(dtype, device):
    acc_dtype = elementwise.accumulation_dtype(dtype)
    q, first, part = random((6, 37, 24), (6, 37, 24), (37, 6, 24), dtype=dtype, device=device)
    lse, part_lse = random((6, 37), (6, 37), dtype=acc_dtype, device=device, seed=1)
    lse, part_lse, part = 20 * lse, 20 * part_lse, part.transpose(0, 1)
    part_lse[0, 5:9] = float("-inf")  # queries that saw no key of the part
    merged = MergedOutput(q, kv_heads=2)
    merged.add(slice(0, 37), first.unflatten(0, (2, 3)), lse.unflatten(0, (2, 3)))
    rows = slice(5, 30)
    merged.add(rows, part[:, rows].unflatten(0, (2, 3)), part_lse[:, rows].unflatten(0, (2, 3)))
    o, o_lse = merged.result(acc_dtype)
    part_lse[:, :5] = part_lse[:, 30:] = float("-inf")
    first, lse, part, part_lse = exact(first, lse, part, part_lse)
    both = torch.logaddexp(lse, part_lse)
    shares = [(x - both).exp().unsqueeze(-1) for x in (lse, part_lse)]
    expected = (first * shares[0] + part * shares[1]).transpose(0, 1)
    assert_close(o, expected, tolerance=accumulation_tolerance(dtype))
    assert_close(o_lse, both, tolerance=accumulation_tolerance(dtype))


@pytest.mark.parametrize("device", ["torch-cpu"], indirect=True)
@pytest.mark.parametrize("kind", ["swiglu", "swiglu_clamped", "gelu_tanh"])
def test_tiles_of_rows_make_no_difference(kind, monkeypatch, device):
    def everything():
        x, dy, up, dup, weight = random(
            (70, 96), (70, 96), (70, 40), (70, 40), (96,), dtype=torch.bfloat16, device=device
        )
        gate = up.flip(0).clone() if kind in GATED else None
        (angle,) = random((70, 1, 4), dtype=torch.float32, device=device)
        inner = elementwise.activation_backward_(dup, gate, up, kind=kind)
        return [
            elementwise.norm(x, of(weight)),
            *elementwise.norm_backward(dy, x, of(weight))[:2],
            *elementwise.norm_backward(dy, x, of(weight, weight)),
            rotate(x.view(70, 12, 8), RotaryTable(angle.cos(), angle.sin())),
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
