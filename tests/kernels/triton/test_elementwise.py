"""Triton's norms, rotary turns, activations and merges against plain torch in float64.

How far results may be off: see :mod:`tests.kernels.operands`.
"""

import pytest
import torch

from sppo.kernels import elementwise
from sppo.kernels.rotary import RotaryTable, rotate
from tests.kernels.operands import (
    DTYPES,
    TOLERANCE,
    Guarded,
    accumulation_tolerance,
    assert_close,
    dtype_name,
    exact,
    poison_fresh_memory,
    random,
)
from tests.kernels.places import DEVICES, need_triton
from tests.tiers import each_once

SHAPES = [(1, 7), (37, 100), (5, 3, 64), (300, 33), (3, 4100)]
EPS = 1e-5

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _triton(device):
    need_triton(device)


@pytest.fixture(autouse=True)
def _fresh_memory_is_poisoned(monkeypatch):
    poison_fresh_memory(monkeypatch)


each_norm = pytest.mark.parametrize("has_bias", [False, True], ids=["rms", "layer"])


def norm_operands(shape, *, has_bias, dtype, device):
    """(x, dy, dresidual, weight, bias or None)."""
    *operands, bias = random(*[shape] * 3, *[shape[-1:]] * 2, dtype=dtype, device=device)
    return *operands, bias if has_bias else None


@each_norm
@pytest.mark.parametrize(("shape", "dtype"), each_once(SHAPES, DTYPES), ids=str)
def test_norms(shape, dtype, has_bias, device):
    from sppo.kernels.triton import norms

    x, dy, dresidual, *parameters = norm_operands(
        shape, has_bias=has_bias, dtype=dtype, device=device
    )
    x += 3 * has_bias
    before = dresidual.clone()
    y = norms.norm(x, *parameters, eps=EPS)
    results = norms.norm_backward(dy, x, *parameters, eps=EPS)
    x_, dy_, *parameters_ = exact(x, dy, *parameters)
    expected = elementwise.norm_backward(dy_, x_, *parameters_, eps=EPS)
    acc_dtype = elementwise.accumulation_dtype(dtype)
    assert [r.dtype for r in (y, *results) if r is not None] == [dtype] * 2 + [acc_dtype] * (
        1 + has_bias
    )
    room = 2 if dtype == torch.float32 and has_bias else 1  # the mean is taken off
    assert_close(y, elementwise.norm(x_, *parameters_, eps=EPS), tolerance=room * TOLERANCE[dtype])
    assert_close(results[0], expected[0], tolerance=room * TOLERANCE[dtype])
    for sums, exact_sums in zip(results[1:], expected[1:], strict=True):
        if sums is not None:
            assert_close(sums, exact_sums, tolerance=2 * accumulation_tolerance(dtype))
    # A gradient around the norm is added before rounding, and changes no sum.
    dx, *sums = norms.norm_backward(dy, x, *parameters, eps=EPS, dresidual_CE=dresidual)
    assert_close(dx, expected[0] + exact(dresidual)[0], tolerance=room * TOLERANCE[dtype])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(sums, results[1:], strict=True))
    assert torch.equal(dresidual, before)


@each_norm
@pytest.mark.parametrize(("shape", "dtype"), each_once(SHAPES, DTYPES), ids=str)
def test_an_addition_before_a_norm(shape, dtype, has_bias, device):
    """The norm is that of the sum as it was rounded, to the last bit."""
    from sppo.kernels.triton import norms

    total, x, _, *parameters = norm_operands(shape, has_bias=has_bias, dtype=dtype, device=device)
    before, (expected,) = x.clone(), exact(total.double() + x.double())
    normed = norms.add_norm_(total, x, *parameters, eps=EPS)
    assert (total.dtype, normed.dtype) == (dtype, dtype)
    assert_close(total, expected, tolerance=TOLERANCE[dtype])
    assert torch.equal(normed, norms.norm(total, *parameters, eps=EPS))
    assert torch.equal(x, before)


@each_norm
@every_dtype
def test_norms_keep_to_their_rows(dtype, has_bias, device):
    from sppo.kernels.triton import norms

    x, dy, dresidual, *parameters = norm_operands(
        (9, 48), has_bias=has_bias, dtype=dtype, device=device
    )
    guarded = [Guarded(t) for t in (x, dy, dresidual)]
    around = Guarded(dy.view(1, -1))  # rows in place are contiguous
    ours, theirs = around.inside.view(9, 48), dy.clone()
    found = [norms.add_norm_(ours, guarded[0].inside, *parameters, eps=EPS), ours]
    dense = [norms.add_norm_(theirs, x, *parameters, eps=EPS), theirs]
    x_, dy_, dresidual_ = (g.inside for g in guarded)
    found += norms.norm_backward(dy_, x_, *parameters, eps=EPS, dresidual_CE=dresidual_)
    dense += norms.norm_backward(dy, x, *parameters, eps=EPS, dresidual_CE=dresidual)
    found.append(norms.norm(x_, *parameters, eps=EPS))
    dense.append(norms.norm(x, *parameters, eps=EPS))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, dense, strict=True))
    assert all(g.intact() for g in (*guarded, around))
    with pytest.raises(AssertionError, match="in place"):
        norms.add_norm_(x_, x, *parameters, eps=EPS)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    each_once([(1, 1, 2), (7, 3, 10), (13, 5, 96), (3, 33, 64)], DTYPES),
    ids=str,
)
def test_rotary(shape, dtype, device):
    from sppo.kernels.triton import rotary

    acc_dtype = elementwise.accumulation_dtype(dtype)
    (x,) = random((*shape[:2], 2 * shape[2]), dtype=dtype, device=device)
    x = x[:, :, : shape[2]]
    (angle,) = random((shape[0], 1, shape[2] // 2), dtype=acc_dtype, device=device, seed=1)
    table = RotaryTable(angle.cos(), angle.sin())
    exact_table = RotaryTable(*exact(table.cos, table.sin))
    for sign in (1.0, -1.0):
        expected = rotate(*exact(x), RotaryTable(exact_table.cos, sign * exact_table.sin))
        turned = rotary.turn(x, table.cos, table.sin, sign=sign)
        assert turned.dtype == dtype
        assert_close(turned, expected, tolerance=TOLERANCE[dtype])


@every_dtype
@pytest.mark.parametrize("kind", ["swiglu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (13, 333)], ids=str)
def test_activations(shape, kind, dtype, device):
    from sppo.kernels.triton import activations

    gate, up, dhidden = (3 * x for x in random(shape, shape, shape, dtype=dtype, device=device))
    gate = gate if kind == "swiglu" else None
    exact_gate, exact_up, exact_dhidden = exact(gate, up, dhidden)
    expected = elementwise.activation(exact_gate, exact_up, kind=kind)
    tolerance = 2 * TOLERANCE[dtype]
    assert_close(activations.activation(gate, up, kind=kind), expected, tolerance=tolerance)
    activations.activation_backward_(dhidden, gate, up, kind=kind)
    inner = elementwise.activation_backward_(exact_dhidden, exact_gate, exact_up, kind=kind)
    assert_close(up, inner.hidden_CF, tolerance=tolerance)
    assert_close(dhidden, inner.dup_CF, tolerance=tolerance)
    if gate is not None:
        assert_close(gate, inner.dgate_CF, tolerance=tolerance)


@every_dtype
@pytest.mark.parametrize("kind", ["swiglu", "gelu", "gelu_tanh"])
def test_activations_far_out(kind, dtype, device):
    from sppo.kernels.triton import activations

    up = torch.tensor([-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4], device=device).to(dtype)
    gate = up.clone() if kind == "swiglu" else None
    up = torch.ones_like(up) if kind == "swiglu" else up
    hidden = activations.activation(gate, up, kind=kind)
    expected = elementwise.activation(*exact(gate, up), kind=kind)
    assert_close(hidden, expected, tolerance=2 * TOLERANCE[dtype])
    dhidden = torch.ones_like(up)
    activations.activation_backward_(dhidden, gate, up, kind=kind)
    assert all(bool(torch.isfinite(x).all()) for x in (dhidden, up, gate) if x is not None)


@every_dtype
def test_merge(dtype, device):
    from sppo.kernels.triton.merge import merge_

    acc_dtype = elementwise.accumulation_dtype(dtype)
    (part,) = random((37, 6, 24), dtype=dtype, device=device)
    o_all, lse, part_lse = random(
        (6, 50, 24), (6, 37), (6, 37), dtype=acc_dtype, device=device, seed=1
    )
    lse, part_lse = 20 * lse, 20 * part_lse
    part_lse[0, :3] = float("-inf")  # queries that saw no key of the part
    o, part = o_all[:, 5:42], part.transpose(0, 1)
    rest = o_all[:, 42:].clone()
    exact_o, exact_lse, exact_part, exact_part_lse = exact(o, lse, part, part_lse)
    both = torch.logaddexp(exact_lse, exact_part_lse)
    shares = [(x - both).exp().unsqueeze(-1) for x in (exact_lse, exact_part_lse)]
    merge_(o, lse, part, part_lse)
    assert_close(
        o, exact_o * shares[0] + exact_part * shares[1], tolerance=accumulation_tolerance(dtype)
    )
    assert_close(lse, both, tolerance=accumulation_tolerance(dtype))
    assert torch.equal(o_all[:, 42:], rest)
