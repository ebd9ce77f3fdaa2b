"""All benchmarks under one roof: which there are, and one run of some of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sppo.bench.attention import measure_attention
from sppo.bench.elementwise import measure_elementwise
from sppo.bench.gemm import measure_gemm
from sppo.bench.operands import Operands
from sppo.bench.timing import Rounds, Timing, Watcher
from sppo.planning.rates import AttentionPoint, ElementwisePoint, GemmPoint

_ROUNDS, _QUICK_ROUNDS = 5, 3


@dataclass(frozen=True, slots=True)
class Measurements:
    """What one run of the benchmarks found; empty where a subject was not asked for.

    Attributes:
        device: "cpu" or "cuda".
        gemm: Linear layers.
        attention: Spans at the end of prefixes.
        elementwise: Element-wise kernels, the loss, the optimizer.
        spreads: Of every timing, between its fastest and slowest round, relative to the median.
        wall_s: The whole run.
    """

    device: str
    gemm: tuple[GemmPoint, ...]
    attention: tuple[AttentionPoint, ...]
    elementwise: tuple[ElementwisePoint, ...]
    spreads: tuple[float, ...]
    wall_s: float


def device_to_measure() -> str:
    """What torch runs on here: "cuda" where it can, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def measure(
    subjects: Sequence[str],
    *,
    device: str,
    dtypes: Sequence[str],
    quick: bool,
    watcher: Watcher,
) -> Measurements:
    """Measure ``subjects``.

    Args:
        subjects: of gemm, attention, elementwise.
        device: "cpu" or "cuda".
        dtypes: of bf16, fp32.
        quick: fewer shapes and rounds: to see that everything works, not to plan with.
        watcher: is told of every timing.
    """
    start = time.perf_counter()
    operands = Operands(device)
    rounds = Rounds(device, count=_QUICK_ROUNDS if quick else _ROUNDS)
    timings: list[Timing] = []
    gemm: tuple[GemmPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    elementwise: tuple[ElementwisePoint, ...] = ()
    if "gemm" in subjects:
        products, gemm = measure_gemm(
            operands, dtypes=dtypes, rounds=rounds, watcher=watcher, quick=quick
        )
        timings += products.values()
    if "attention" in subjects:
        spans, attention = measure_attention(
            operands, dtypes=dtypes, rounds=rounds, watcher=watcher, quick=quick
        )
        timings += spans.values()
    if "elementwise" in subjects:
        kernels, elementwise = measure_elementwise(
            operands, dtypes=dtypes, rounds=rounds, watcher=watcher, quick=quick
        )
        timings += kernels.values()
    spreads = tuple(timing.spread for timing in timings)
    return Measurements(device, gemm, attention, elementwise, spreads, time.perf_counter() - start)
