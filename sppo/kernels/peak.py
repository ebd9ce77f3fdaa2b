"""Measured rate of matrix products: the denominator of MFU without a hardware description."""

from __future__ import annotations

import time

import torch

from sppo.kernels.linear import input_gradient

_SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows of a square product that is large enough to keep every multiprocessor busy, yet short."""
_ROUNDS = 8
_LEAST_S = 0.3
"""Seconds of rounds at least: a disturbance of some milliseconds then leaves fast rounds."""


def measure_matmul_flops_per_s(dtype: torch.dtype, *, device: torch.device | str = "cpu") -> float:
    """Return the highest FLOP/s of some square products, measured in well under a second."""
    device = torch.device(device)
    size = _SIZES[device.type]
    random = torch.Generator(device).manual_seed(0)  # leaves the global generator unchanged
    a, b = (torch.randn(size, size, generator=random, device=device).to(dtype) for _ in range(2))
    into = torch.empty_like(a)
    seconds: list[float] = []
    while len(seconds) < _ROUNDS or sum(seconds) < _LEAST_S:
        _wait_for(device)
        start = time.perf_counter()
        input_gradient(a, b, into_CI=into)
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def _wait_for(device: torch.device) -> None:
    """Wait until the device is idle; on a CPU a product is complete when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
