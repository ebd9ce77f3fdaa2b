"""How fast this device multiplies matrices: the denominator of MFU when no description gives it."""

from __future__ import annotations

import time

import torch

_SIZE = 1024
_ROUNDS = 8


def measure_matmul_flops_per_s(dtype: torch.dtype, *, device: str = "cpu") -> float:
    """Best FLOP/s of a few 1024^3 products, measured now; takes well under a second."""
    a, b = (torch.randn(_SIZE, _SIZE, device=device).to(dtype) for _ in range(2))
    best_s = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        _ = a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * _SIZE**3 / best_s
