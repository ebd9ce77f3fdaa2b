"""Measured rate of matrix products: the denominator of MFU without a hardware description."""

from __future__ import annotations

import time

import torch

_SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows of a square product that is large enough to keep every multiprocessor busy, yet short."""
_ROUNDS = 8


def measure_matmul_flops_per_s(dtype: torch.dtype, *, device: torch.device | str = "cpu") -> float:
    """Return the highest FLOP/s of a few square products, measured in well under a second."""
    device = torch.device(device)
    size = _SIZES[device.type]
    random = torch.Generator(device).manual_seed(0)  # leaves the global generator unchanged
    a, b = (torch.randn(size, size, generator=random, device=device).to(dtype) for _ in range(2))
    best_s = float("inf")
    for _ in range(_ROUNDS):
        _wait_for(device)
        start = time.perf_counter()
        _ = a @ b
        _wait_for(device)
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * size**3 / best_s


def _wait_for(device: torch.device) -> None:
    """Wait until the device is idle; on a CPU a product is complete when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
