"""Timing of the three products of a linear layer as the engine calls them, on a grid of shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import get_args

import torch

from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, KernelBench, Timing
from sppo.hardware.rates import GemmPoint, Product
from sppo.kernels.linear import accumulate_weight_gradient, input_gradient, linear

GemmKey = tuple[str, int, int, Product]
"""(dtype, tokens, width, product)."""

_TOKENS = {"cpu": (256, 1024, 4096), "cuda": (512, 2048, 8192, 32768)}
_WIDTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
_QUICK_TOKENS = {"cpu": (256, 1024), "cuda": (2048, 8192)}
_QUICK_WIDTHS = {"cpu": (256, 1024), "cuda": (2048, 4096)}
_LONGEST_S = 0.2


def measure_gemm(bench: KernelBench, *, quick: bool) -> tuple[GemmPoint, ...]:
    """Return the rates of products ``[tokens, width] x [width, width]``; of few if ``quick``."""
    device = bench.operands.device
    tokens_of, widths_of = (_QUICK_TOKENS, _QUICK_WIDTHS) if quick else (_TOKENS, _WIDTHS)
    all_tokens = tokens_of[device]
    cases = {
        (dtype, tokens, width, product): partial(
            _make, bench.operands, dtype, tokens, width, product
        )
        for dtype in bench.dtypes
        for width in _narrower(bench, all_tokens, widths_of[device], dtype=dtype)
        for tokens in all_tokens
        for product in get_args(Product)
    }
    return gemm_points(bench.time("gemm", cases))


def gemm_points(timings: Mapping[GemmKey, Timing]) -> tuple[GemmPoint, ...]:
    """Return the rates of each layer from the times of its three products."""
    points = []
    for dtype, tokens, width in dict.fromkeys(key[:3] for key in timings):
        flops = 2 * tokens * width * width
        forward, from_output, weight = (
            flops / timings[dtype, tokens, width, product].median_s for product in get_args(Product)
        )
        points.append(GemmPoint(dtype, tokens, width, forward, from_output, weight))
    return tuple(points)


def _narrower(
    bench: KernelBench, tokens: Sequence[int], widths: Sequence[int], *, dtype: str
) -> Sequence[int]:
    """Return the widths without the largest ones that take too long; at least two remain."""
    probe = _make(bench.operands, dtype, tokens[0], widths[0], "forward")
    per_flop_s = bench.time_once(probe) / (tokens[0] * widths[0] ** 2)
    while len(widths) > 2 and per_flop_s * tokens[-1] * widths[-1] ** 2 > _LONGEST_S:
        widths = widths[:-1]
    return widths


def _make(operands: Operands, dtype: str, tokens: int, width: int, product: Product) -> Call:
    operands.begin()
    of = DTYPES[dtype]
    x, dy = (operands.take(tokens, width, dtype=of) for _ in range(2))
    weight = operands.take(width, width, dtype=of)
    if product == "forward":
        return lambda: linear(x, weight)
    if product == "input":
        return lambda: input_gradient(dy, weight)
    total = operands.zeros(width, width, dtype=torch.float32)
    return lambda: accumulate_weight_gradient(total, dy, x)
