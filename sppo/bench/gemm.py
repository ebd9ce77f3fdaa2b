"""The three products of a linear layer, as the engine calls them, on a grid of shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import get_args

import torch

from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, Case, Rounds, Timing, Watcher, time_cases, time_once
from sppo.kernels.linear import accumulate_weight_gradient, linear
from sppo.planning.rates import GemmPoint, Product

GemmKey = tuple[str, int, int, Product]
"""(dtype, tokens, width, product)."""

_TOKENS = {"cpu": (256, 1024, 4096), "cuda": (512, 2048, 8192, 32768)}
_WIDTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
_QUICK_TOKENS = {"cpu": (256, 1024), "cuda": (2048, 8192)}
_QUICK_WIDTHS = {"cpu": (256, 1024), "cuda": (2048, 4096)}
_LONGEST_S = 0.2


def measure_gemm(
    operands: Operands,
    *,
    dtypes: Sequence[str],
    rounds: Rounds,
    watcher: Watcher,
    quick: bool = False,
) -> tuple[Mapping[GemmKey, Timing], tuple[GemmPoint, ...]]:
    """Time products ``[tokens, width] x [width, width]``; a slow device gets smaller ones."""
    cases = [case for dtype in dtypes for case in _cases(operands, dtype=dtype, quick=quick)]
    watcher.begin("gemm", total=len(cases) * rounds.count)
    timings = time_cases(cases, rounds=rounds, watcher=watcher)
    return timings, gemm_points(timings)


def gemm_points(timings: Mapping[GemmKey, Timing]) -> tuple[GemmPoint, ...]:
    """Rates of each layer from the times of its three products."""
    points = []
    for dtype, tokens, width in dict.fromkeys(key[:3] for key in timings):
        flops = 2 * tokens * width * width
        forward, from_output, weight = (
            flops / timings[dtype, tokens, width, product].median_s for product in get_args(Product)
        )
        points.append(GemmPoint(dtype, tokens, width, forward, from_output, weight))
    return tuple(points)


def _cases(operands: Operands, *, dtype: str, quick: bool) -> Iterator[Case[GemmKey]]:
    device = operands.device
    all_tokens: tuple[int, ...] = (_QUICK_TOKENS if quick else _TOKENS)[device]
    widths: tuple[int, ...] = (_QUICK_WIDTHS if quick else _WIDTHS)[device]
    side = widths[0]
    seconds = time_once(_make(operands, dtype, all_tokens[0], side, "forward"), device=device)
    per_flop_s = seconds / (all_tokens[0] * side * side)
    while len(widths) > 2 and per_flop_s * all_tokens[-1] * widths[-1] ** 2 > _LONGEST_S:
        widths = widths[:-1]
    for tokens in all_tokens:
        for width in widths:
            for product in get_args(Product):
                key = (dtype, tokens, width, product)
                yield Case(key, partial(_make, operands, *key))


def _make(operands: Operands, dtype: str, tokens: int, width: int, product: Product) -> Call:
    operands.begin()
    of = DTYPES[dtype]
    x, dy = (operands.take(tokens, width, dtype=of) for _ in range(2))
    weight = operands.take(width, width, dtype=of)
    if product == "forward":
        return lambda: linear(x, weight)
    if product == "input":
        return lambda: dy @ weight
    total = operands.zeros(width, width, dtype=torch.float32)
    return lambda: accumulate_weight_gradient(total, dy, x)
