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


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape, dtype, device):
    from sppo.kernels.triton import norms

    x, dy, weight = random(shape, shape, shape[-1:], dtype=dtype, device=device)
    y = norms.rms_norm(x, weight, eps=EPS)
    dx, dweight = norms.rms_norm_backward(dy, x, weight, eps=EPS)
    dy, x, weight = exact(dy, x, weight)
    expected = elementwise.rms_norm_backward(dy, x, weight, eps=EPS)
    assert (y.dtype, dx.dtype, dweight.dtype) == (
        dtype,
        dtype,
        elementwise.accumulation_dtype(dtype),
    )
    assert_close(y, elementwise.rms_norm(x, weight, eps=EPS), tolerance=TOLERANCE[dtype])
    assert_close(dx, expected[0], tolerance=TOLERANCE[dtype])
    assert_close(dweight, expected[1], tolerance=accumulation_tolerance(dtype))


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape, dtype, device):
    from sppo.kernels.triton import norms

    shapes = (shape, shape, shape[-1:], shape[-1:])
    x, dy, weight, bias = random(*shapes, dtype=dtype, device=device)
    x += 3
    y = norms.layer_norm(x, weight, bias, eps=EPS)
    dx, dweight, dbias = norms.layer_norm_backward(dy, x, weight, bias, eps=EPS)
    dy, x, weight, bias = exact(dy, x, weight, bias)
    expected = elementwise.layer_norm_backward(dy, x, weight, bias, eps=EPS)
    room = 2 if dtype == torch.float32 else 1  # the mean is taken off
    assert_close(
        y, elementwise.layer_norm(x, weight, bias, eps=EPS), tolerance=room * TOLERANCE[dtype]
    )
    assert_close(dx, expected[0], tolerance=room * TOLERANCE[dtype])
    assert_close(dweight, expected[1], tolerance=2 * accumulation_tolerance(dtype))
    assert_close(dbias, expected[2], tolerance=accumulation_tolerance(dtype))


def norm_functions(name):
    """(the norm, with an addition, its backward) of Triton, and the number of its parameters."""
    from sppo.kernels.triton import norms

    functions = (getattr(norms, f) for f in (name, f"add_{name}_", f"{name}_backward"))
    return *functions, 1 if name == "rms_norm" else 2


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_an_addition_before_a_norm(name, shape, dtype, device):
    """The norm is that of the sum as it was rounded, to the last bit."""
    norm, add_norm_, _backward, num_parameters = norm_functions(name)
    total, x, *parameters = random(
        shape, shape, *[shape[-1:]] * num_parameters, dtype=dtype, device=device
    )
    before, (expected,) = x.clone(), exact(total.double() + x.double())
    normed = add_norm_(total, x, *parameters, eps=EPS)
    assert (total.dtype, normed.dtype) == (dtype, dtype)
    assert_close(total, expected, tolerance=TOLERANCE[dtype])
    assert torch.equal(normed, norm(total, *parameters, eps=EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"), each_once(["rms_norm", "layer_norm"], SHAPES, DTYPES), ids=str
)
def test_a_gradient_around_a_norm(name, shape, dtype, device):
    """Rounded once; parameters' gradients do not depend on it."""
    _norm, _add_norm, backward, num_parameters = norm_functions(name)
    x, dy, dresidual, *parameters = random(
        *[shape] * 3, *[shape[-1:]] * num_parameters, dtype=dtype, device=device
    )
    before = dresidual.clone()
    dx, *sums = backward(dy, x, *parameters, eps=EPS, dresidual_CE=dresidual)
    plain, *plain_sums = backward(dy, x, *parameters, eps=EPS)
    expected = getattr(elementwise, f"{name}_backward")(*exact(dy, x, *parameters), eps=EPS)[0]
    assert dx.dtype == plain.dtype == dtype
    assert_close(dx, expected + exact(dresidual)[0], tolerance=TOLERANCE[dtype])
    assert all(torch.equal(a, b) for a, b in zip(sums, plain_sums, strict=True))
    assert torch.equal(dresidual, before)


@every_dtype
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_additions_beside_norms_keep_to_their_rows(name, dtype, device):
    _norm, add_norm_, backward, num_parameters = norm_functions(name)
    shape = (9, 48)
    total, x, dy, dresidual, *parameters = random(
        *[shape] * 4, *[shape[-1:]] * num_parameters, dtype=dtype, device=device
    )
    guarded = [Guarded(t) for t in (x, dy, dresidual)]
    around = Guarded(total.view(1, -1))  # rows in place are contiguous
    ours, theirs = around.inside.view(shape), total.clone()
    normed = add_norm_(ours, guarded[0].inside, *parameters, eps=EPS)
    assert torch.equal(normed, add_norm_(theirs, x, *parameters, eps=EPS))
    assert torch.equal(ours, theirs)
    options = {"eps": EPS, "dresidual_CE": guarded[2].inside}
    gradients = backward(guarded[1].inside, guarded[0].inside, *parameters, **options)
    dense = backward(dy, x, *parameters, eps=EPS, dresidual_CE=dresidual)
    assert all(torch.equal(a, b) for a, b in zip(gradients, dense, strict=True))
    assert all(g.intact() for g in (*guarded, around))
    with pytest.raises(AssertionError, match="in place"):
        add_norm_(guarded[0].inside, x, *parameters, eps=EPS)


@every_dtype
def test_norms_of_rows_that_are_not_neighbours(dtype, device):
    from sppo.kernels.triton import norms

    around, dy_around, weight = random((9, 48), (9, 50), (16,), dtype=dtype, device=device)
    x, dy = around[:, 16:32], dy_around[:, 3:19]
    ours = [norms.rms_norm(x, weight, eps=EPS), *norms.rms_norm_backward(dy, x, weight, eps=EPS)]
    dense = [x.contiguous(), dy.contiguous()]
    theirs = [
        norms.rms_norm(dense[0], weight, eps=EPS),
        *norms.rms_norm_backward(dense[1], dense[0], weight, eps=EPS),
    ]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


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
