"""Run of the requested benchmarks, and their measurements in one object."""

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
from sppo.bench.documents import DocumentSeconds, measure_documents
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
    """Results of one run of the benchmarks; empty for subjects that were not requested.

    Attributes:
        device: "cpu" or "cuda".
        gemm: Rates of linear layers.
        attention: Rates of spans at the end of prefixes, with the back end that ``auto`` chooses;
            also empty if the requested shapes are none that plans can read.
        elementwise: Rates of element-wise kernels, the loss and the optimizer.
        spreads: Difference between the fastest and slowest round of each timing, relative to the
            median.
        wall_s: Seconds of the whole run.
        copies: Copy measurements, one entry per tier behind the device.
        overlap: Copies that overlap with compute; None if not requested.
        backends: Attention with every back end; None if not requested.
        messages: Messages between ranks on the CPU; None if not requested.
        documents: Attention over short documents, with attention on a CPU; None otherwise.
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
    documents: DocumentSeconds | None = None


@dataclass(frozen=True, slots=True)
class CopySetup:
    """Targets of measured copies, and the compute that the copies overlap with.

    Attributes:
        directory: Directory on the disk to measure; None to measure host memory only.
        layer: Layer whose forward the copies overlap with.
    """

    directory: Path | None
    layer: MeasuredLayer


@dataclass(frozen=True, slots=True)
class Grids:
    """Shapes to time, for the subjects whose shapes a user can choose."""

    gemm: GemmGrid
    attention: AttentionGrid


def default_grids(device: str, *, quick: bool) -> Grids:
    """Return the default shapes to time; few of them if ``quick``."""
    return Grids(gemm_grid(device, quick=quick), attention_grid(device, quick=quick))


def device_to_measure() -> str:
    """Return the device that torch can use on this machine: "cuda" if available, else "cpu"."""
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
    """Run the benchmarks named in ``subjects``.

    Args:
        subjects: Some of gemm, attention, elementwise, messages, pcie and overlap; the last two
            need ``copying``.
        device: "cpu" or "cuda".
        dtypes: Some of bf16 and fp32.
        quick: Measure fewer shapes and rounds, to test the benchmarks, not to plan with.
        watcher: Receiver of the progress, notified of every timing.
        grids: Shapes of gemm and attention; None for the default shapes.
        copying: Targets of copies, and the layer that they overlap with.

    Raises:
        ValueError: A directory that does not exist.
        OSError: A disk that lacks the space, or failed.
        MemoryError: A host that lacks the memory, or may not lock it.
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
    """Yield the measured copies to each available tier: host memory for a GPU, and a disk."""
    if device == "cuda":
        devices = [torch.device(device, index) for index in range(torch.cuda.device_count())]
        yield measure_pcie(devices, quick=quick, watcher=watcher)
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
    """Measure kernels: matrix products, attention, element-wise kernels."""
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
        if operands.device == "cpu":
            calls, documents = measure_documents(
                operands, dtypes=dtypes, rounds=rounds, watcher=watcher
            )
            found = replace(found, documents=documents)
            timings += calls.values()
    if "elementwise" in subjects:
        kernels, elementwise = measure_elementwise(
            operands, dtypes=dtypes, rounds=rounds, watcher=watcher, quick=quick
        )
        found = replace(found, elementwise=elementwise)
        timings += kernels.values()
    return found, timings
