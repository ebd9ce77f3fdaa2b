"""All benchmarks under one roof: which there are, and one run of some of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sppo.bench.attention import attention_points, measure_attention
from sppo.bench.attention_backends import BackendComparison
from sppo.bench.attention_grid import AttentionGrid, attention_grid
from sppo.bench.copies import CopyMeasurements
from sppo.bench.disk import measure_disk
from sppo.bench.elementwise import measure_elementwise
from sppo.bench.gemm import GemmGrid, gemm_grid, measure_gemm
from sppo.bench.messages import MessageMeasurements, measure_messages
from sppo.bench.operands import Operands
from sppo.bench.overlap import MeasuredLayer, OverlapMeasurements, measure_overlap
from sppo.bench.pcie import measure_pcie
from sppo.bench.timing import Rounds, Timing, Watcher
from sppo.hardware.rates import AttentionPoint, ElementwisePoint, GemmPoint

_ROUNDS, _QUICK_ROUNDS = 5, 3


@dataclass(frozen=True, slots=True)
class Measurements:
    """Findings of one run of the benchmarks; empty where a subject was not asked for.

    Attributes:
        device: "cpu" or "cuda".
        gemm: Linear layers.
        attention: Spans at the end of prefixes, with the back end that ``auto`` takes; also empty
            where shapes were asked for that plans cannot read.
        elementwise: Element-wise kernels, the loss, the optimizer.
        spreads: Of every timing, between its fastest and slowest round, relative to the median.
        wall_s: The whole run.
        copies: One entry per tier behind the device.
        overlap: Copies behind compute; None where not asked for.
        backends: Attention with every back end; None where not asked for.
        messages: Between ranks on the CPU; None where not asked for.
    """

    device: str
    gemm: tuple[GemmPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    elementwise: tuple[ElementwisePoint, ...] = ()
    spreads: tuple[float, ...] = ()
    wall_s: float = 0.0
    copies: tuple[CopyMeasurements, ...] = ()
    overlap: OverlapMeasurements | None = None
    backends: BackendComparison | None = None
    messages: MessageMeasurements | None = None


@dataclass(frozen=True, slots=True)
class CopySetup:
    """Targets of measured copies, and the compute that they run behind.

    Attributes:
        directory: On the disk to measure; None where only host memory is.
        layer: Whose forward copies run behind.
    """

    directory: Path | None
    layer: MeasuredLayer


@dataclass(frozen=True, slots=True)
class Grids:
    """Shapes of the subjects that can be asked for some."""

    gemm: GemmGrid
    attention: AttentionGrid


def default_grids(device: str, *, quick: bool) -> Grids:
    """Return the shapes that are timed where nobody asks for any; few of them if ``quick``."""
    return Grids(gemm_grid(device, quick=quick), attention_grid(device, quick=quick))


def device_to_measure() -> str:
    """Return the device that torch runs on here: "cuda" where it can, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def measure(
    subjects: Sequence[str],
    *,
    device: str,
    dtypes: Sequence[str],
    quick: bool,
    watcher: Watcher,
    grids: Grids | None = None,
    copying: CopySetup | None = None,
) -> Measurements:
    """Measure ``subjects``.

    Args:
        subjects: of gemm, attention, elementwise, messages, pcie, overlap; the last two need
            ``copying``.
        device: "cpu" or "cuda".
        dtypes: of bf16, fp32.
        quick: fewer shapes and rounds: to see that everything works, not to plan with.
        watcher: is told of every timing.
        grids: shapes of gemm and attention; None for the default ones.
        copying: where copies go, and what they run behind.

    Raises:
        ValueError: there is no such directory.
        OSError: the disk has not the room, or failed.
        MemoryError: the host has not the memory, or may not lock it.
    """
    start = time.perf_counter()
    operands = Operands(device)
    kernels, timings = _measure_kernels(
        subjects,
        operands,
        grids or default_grids(device, quick=quick),
        dtypes=dtypes,
        quick=quick,
        watcher=watcher,
    )
    messages = measure_messages(quick=quick, watcher=watcher) if "messages" in subjects else None
    copies: tuple[CopyMeasurements, ...] = ()
    overlap: OverlapMeasurements | None = None
    if "pcie" in subjects:
        assert copying is not None, "copies go somewhere"
        copies = tuple(_measure_copies(device, copying, quick=quick, watcher=watcher))
    if "overlap" in subjects:
        assert copying is not None, "copies go somewhere"
        overlap = measure_overlap(
            operands, copying.layer, directory=copying.directory, quick=quick, watcher=watcher
        )
    spreads = [timing.spread for timing in timings]
    spreads += [point.spread for measured in copies for point in measured.points]
    spreads += [] if messages is None else [messages.spread]
    spreads += [] if overlap is None else [point.spread for point in overlap.points]
    return replace(
        kernels,
        spreads=tuple(spreads),
        wall_s=time.perf_counter() - start,
        copies=copies,
        overlap=overlap,
        messages=messages,
    )


def _measure_copies(
    device: str, copying: CopySetup, *, quick: bool, watcher: Watcher
) -> Iterator[CopyMeasurements]:
    """Measure copies to every tier that is there: host memory of a GPU, and a disk."""
    if device == "cuda":
        yield measure_pcie(torch.device(device), quick=quick, watcher=watcher)
    if copying.directory is not None:
        yield measure_disk(copying.directory, quick=quick, watcher=watcher)


def _measure_kernels(
    subjects: Sequence[str],
    operands: Operands,
    grids: Grids,
    *,
    dtypes: Sequence[str],
    quick: bool,
    watcher: Watcher,
) -> tuple[Measurements, Sequence[Timing]]:
    """Measure what computes: matrix products, attention, element-wise kernels."""
    rounds = Rounds(operands.device, count=_QUICK_ROUNDS if quick else _ROUNDS)
    found, timings = Measurements(operands.device), list[Timing]()
    if "gemm" in subjects:
        products, gemm = measure_gemm(
            operands, grids.gemm, dtypes=dtypes, rounds=rounds, watcher=watcher
        )
        found = replace(found, gemm=gemm)
        timings += products.values()
    if "attention" in subjects:
        spans, backends = measure_attention(
            operands, grids.attention, dtypes=dtypes, rounds=rounds, watcher=watcher
        )
        points = attention_points(backends, grids.attention)
        found = replace(found, attention=points, backends=backends)
        timings += spans.values()
    if "elementwise" in subjects:
        kernels, elementwise = measure_elementwise(
            operands, dtypes=dtypes, rounds=rounds, watcher=watcher, quick=quick
        )
        found = replace(found, elementwise=elementwise)
        timings += kernels.values()
    return found, timings
