"""Norm and scaling of many tensors by Triton, against torch in float64.

1e-6 in fp32 and 1e-14 in float64, as sums over rows elsewhere: a lane adds at most 16 squares in
the tensors' type, the rest is added in float64. A scaled element is rounded once, so it is torch's.
"""

import pytest
import torch

from sppo.kernels import gradient_norm as chosen
from tests.kernels.operands import TOLERANCE, Guarded, dtype_name, poison_fresh_memory, random
from tests.kernels.places import DEVICES, need_triton

SHAPES = [(1,), (7, 5), (1, 4096), (3, 333), (1, 65536), (1, 65537), (2, 70001), (1, 0)]

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name),
]


@pytest.fixture(autouse=True)
def _triton(device):
    need_triton(device)


@pytest.fixture(autouse=True)
def _fresh_memory_is_poisoned(monkeypatch):
    poison_fresh_memory(monkeypatch)


def guarded(shapes, *, dtype, device, seed=0):
    """Tensors that begin wherever their guards let them, and the guards."""
    guards = [
        Guarded(x.view(1, -1)) for x in random(*shapes, dtype=dtype, device=device, seed=seed)
    ]
    tensors = [g.inside.view(s) for g, s in zip(guards, shapes, strict=True)]
    return tensors, guards


def exact_norm(tensors):
    return torch.cat([x.double().cpu().flatten() for x in tensors]).norm()


def assert_norm(norm, tensors):
    dtype = tensors[0].dtype
    assert (norm.dtype, norm.shape, norm.device) == (dtype, (), tensors[0].device)
    expected = exact_norm(tensors)
    assert abs(float(norm) - float(expected)) <= TOLERANCE[dtype] * float(expected)


@pytest.mark.parametrize("shapes", [[s] for s in SHAPES[:-1]] + [SHAPES, SHAPES[::-1]], ids=str)
def test_norm(shapes, dtype, device):
    from sppo.kernels.triton.gradient_norm import total_norm

    tensors, _guards = guarded(shapes, dtype=dtype, device=device)
    assert_norm(total_norm(tensors), tensors)
    here, elsewhere = ([x.clone() for x in tensors] for _ in range(2))
    assert_norm(total_norm(here), tensors)
    assert torch.equal(total_norm(here), total_norm(elsewhere))


@pytest.mark.parametrize("factor", [0.37, 1.0, 0.0, float("nan")])
def test_scale(factor, dtype, device):
    from sppo.kernels.triton.gradient_norm import scale_

    tensors, guards = guarded(SHAPES, dtype=dtype, device=device)
    factor = torch.tensor(factor, dtype=dtype, device=device)
    expected = [x * factor for x in tensors]
    scale_(tensors, factor)
    for actual, scaled in zip(tensors, expected, strict=True):
        assert torch.equal(actual.nan_to_num(0.5), scaled.nan_to_num(0.5))
    assert all(g.intact() for g in guards)


def test_what_is_not_finite_shows(dtype, device):
    from sppo.kernels.triton.gradient_norm import total_norm

    tensors, _guards = guarded([(3, 5), (70000,)], dtype=dtype, device=device)
    for value in (float("inf"), float("nan")):
        tensors[1][69999] = value
        assert torch.equal(total_norm(tensors).isnan(), torch.tensor(value).isnan().to(device))
        assert not total_norm(tensors).isfinite()


def test_more_chunks_than_the_root_takes_at_once(dtype, device, monkeypatch):
    from sppo.kernels.triton import gradient_norm

    monkeypatch.setattr(gradient_norm, "_CHUNK", 64)
    monkeypatch.setattr(gradient_norm, "_BLOCK", 16)
    monkeypatch.setattr(gradient_norm, "_ROOT_BLOCK", 8)
    gradient_norm._cached_table.cache_clear()
    tensors, guards = guarded([(13, 101), (5,)], dtype=dtype, device=device)
    assert_norm(gradient_norm.total_norm(tensors), tensors)
    expected = [x * 0.5 for x in tensors]
    gradient_norm.scale_(tensors, torch.tensor(0.5, dtype=dtype, device=device))
    gradient_norm._cached_table.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    assert all(g.intact() for g in guards)


def test_a_table_is_built_once_for_tensors_that_stay(dtype, device):
    from sppo.kernels.triton import gradient_norm

    tensors, _guards = guarded(SHAPES, dtype=dtype, device=device)
    gradient_norm._cached_table.cache_clear()
    first, _aligned = gradient_norm._table(tensors)
    for x in tensors:
        x.mul_(2)
    assert gradient_norm._table(tensors)[0] is first
    offloaded = [*tensors[:-2], tensors[-2].clone(), tensors[-1]]
    assert gradient_norm._table(offloaded)[0] is not first
    assert int(first[:, 1].sum()) == sum(x.numel() for x in tensors)


@pytest.fixture
def launched(monkeypatch):
    """As on a GPU; the functions of Triton that were called."""
    from sppo.kernels import fused
    from sppo.kernels.triton import gradient_norm

    names = []

    def watch(name):
        function = getattr(gradient_norm, name)

        def watched(*arguments):
            names.append(name)
            return function(*arguments)

        monkeypatch.setattr(gradient_norm, name, watched)

    watch("total_norm")
    watch("scale_")
    monkeypatch.setattr(fused, "fused", lambda x: True)
    return names


def norm_and_scaled(tensors, factor):
    tensors = [x.clone(memory_format=torch.preserve_format) for x in tensors]
    norm = chosen.total_norm(tensors)
    chosen.scale_(tensors, factor)
    return norm, *tensors


def test_torch_does_the_same_elsewhere(dtype, device, launched, monkeypatch):
    from sppo.kernels import fused

    tensors = random(*SHAPES, dtype=dtype, device=device)
    factor = torch.tensor(0.37, dtype=dtype)  # on the host, as of ranks that added their norms up
    ours = norm_and_scaled(tensors, factor)
    assert launched == ["total_norm", "scale_"]
    monkeypatch.setattr(fused, "fused", lambda x: False)
    theirs = norm_and_scaled(tensors, factor)
    assert launched == ["total_norm", "scale_"]
    torch.testing.assert_close(ours[0], theirs[0], rtol=TOLERANCE[dtype], atol=0)
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))


def test_what_no_table_describes_is_left_to_torch(dtype, device, launched):
    (x, narrow) = random((9, 8), (5,), dtype=dtype, device=device)
    factor = torch.tensor(0.5, dtype=dtype)
    for tensors in ([x.T], [x, narrow.half()], [narrow[:0]], [narrow.half()]):
        norm, *scaled = norm_and_scaled(tensors, factor)
        assert float(norm) == pytest.approx(float(exact_norm(tensors)), rel=1e-3)
        assert all(torch.equal(a, b * 0.5) for a, b in zip(scaled, tensors, strict=True))
    assert launched == []
