"""Rates of element-wise kernels, the loss and the optimizer, over bytes that the planner counts.

The bytes are those of :mod:`sppo.cost.elementwise`, the least that a kernel could read and
write, so that the time predicted from these bytes and rates is the time measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from sppo.bench.kernel_calls import MAKERS
from sppo.bench.operands import DTYPES, Operands
from sppo.bench.timing import Call, KernelBench, Timing
from sppo.cost.elementwise.layer_work import PASSES, bytes_per_element
from sppo.hardware.rates import ElementwisePoint

ElementwiseKey = tuple[str, str, int]
"""(kernel, dtype, elements)."""

_ELEMENTS = {"cpu": (1 << 16, 1 << 19, 1 << 22), "cuda": (1 << 20, 1 << 23, 1 << 26)}
_QUICK_ELEMENTS = {"cpu": (1 << 18,), "cuda": (1 << 24,)}


def measure_elementwise(bench: KernelBench, *, quick: bool) -> tuple[ElementwisePoint, ...]:
    """Return the rates of every kernel on tensors of several sizes; few of them if ``quick``."""
    operands = bench.operands
    sizes = (_QUICK_ELEMENTS if quick else _ELEMENTS)[operands.device]
    cases = {
        (kernel, dtype, elements): partial(_make, operands, kernel, dtype, elements)
        for dtype in bench.dtypes
        for kernel in kernels_of(dtype, device=operands.device)
        for elements in sizes
    }
    return elementwise_points(bench.time("elementwise", cases))


def elementwise_points(
    timings: Mapping[ElementwiseKey, Timing],
) -> tuple[ElementwisePoint, ...]:
    """Return the rate of every timing, over the bytes that the planner counts."""
    points = []
    for (kernel, dtype, elements), timing in timings.items():
        copied_bytes = elements * bytes_per_element(kernel, element_bytes=DTYPES[dtype].itemsize)
        points.append(ElementwisePoint(kernel, dtype, elements, copied_bytes / timing.median_s))
    return tuple(points)


def kernels_of(dtype: str, *, device: str) -> Iterator[str]:
    """Yield the kernels that runs with ``dtype`` on ``device`` launch.

    fp32 weights have no separate master weights to round ("narrow"), and only runs on a CPU copy
    saved tensors ("save").
    """
    for kernel in PASSES:
        if (kernel, dtype) != ("narrow", "fp32") and (kernel != "save" or device == "cpu"):
            yield kernel


def _make(operands: Operands, kernel: str, dtype: str, elements: int) -> Call:
    operands.begin()
    return MAKERS[kernel](operands, DTYPES[dtype], elements)
