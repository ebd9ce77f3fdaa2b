"""Operands of kernels under test, and how far results may be from those in float64.

Relative Frobenius norm. Results in bf16 are rounded once, which costs at most u = 2^-8; under the
interpreter, which cuts bits off, 2 u. fp16 is allowed 2^-11, fp32 1e-6, float64 1e-14; sums over
rows are kept in fp32 whatever the type, and allowed 1e-6.
"""

import torch

TOLERANCE = {
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-11,
    torch.float32: 1e-6,
    torch.float64: 1e-14,
}
DTYPES = list(TOLERANCE)
_MARGIN = 5


def dtype_name(dtype):
    """As a test's id."""
    return str(dtype).removeprefix("torch.")


def poison_fresh_memory(monkeypatch):
    """What is left unwritten of a kernel's output is NaN from here on."""
    empty = torch.empty

    def poisoned(*arguments, **options):
        x = empty(*arguments, **options)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)


def random(*shapes, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes
    ]


def exact(*tensors):
    return [None if x is None else x.cpu().double().clone() for x in tensors]


class Guarded:
    """A matrix amid NaN: rows above and below, columns at both sides.

    What a kernel reads there shows in its results, what it writes there in :meth:`intact`.
    """

    def __init__(self, x):
        rows, columns = x.shape
        self._around = x.new_full((rows + 2, columns + 2 * _MARGIN), float("nan"))
        self.inside = self._around[1:-1, _MARGIN:-_MARGIN]
        self.inside.copy_(x)

    def intact(self):
        outside = torch.ones_like(self._around, dtype=torch.bool)
        outside[1:-1, _MARGIN:-_MARGIN] = False
        return bool(self._around[outside].isnan().all())


def assert_close(actual, expected, *, tolerance):
    assert actual.shape == expected.shape
    error = float((actual.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error <= tolerance, f"{error:.2e} above {tolerance:.2e}"


def accumulation_tolerance(dtype):
    return TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
