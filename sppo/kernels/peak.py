"""Rate of matrix products on this device: the denominator of MFU without a description."""

from __future__ import annotations

import time

import torch

_SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows of a square product that keeps every multiprocessor of a device busy, and no longer than it
must."""
_ROUNDS = 8


def measure_matmul_flops_per_s(dtype: torch.dtype, *, device: torch.device | str = "cpu") -> float:
    """Best FLOP/s of a few square products, measured now; takes well under a second."""
    device = torch.device(device)
    size = _SIZES[device.type]
    random = torch.Generator(device).manual_seed(0)  # the program's own goes on as it was
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
    """Return when the device is done; on a CPU a product is done when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
