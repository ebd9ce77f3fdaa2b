"""Run of the requested benchmarks, and their measurements in one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sppo.bench.attention import (
    AttentionRates,
    DocumentSeconds,
    attention_problems,
    measure_attention,
    measure_documents,
)
from sppo.bench.copies import CopyMeasurements
from sppo.bench.delta_rule import RuleRates, measure_rule
from sppo.bench.disk import measure_disk
from sppo.bench.elementwise import measure_elementwise
from sppo.bench.gemm import measure_gemm
from sppo.bench.messages import MessageMeasurements, measure_messages
from sppo.bench.operands import Operands
from sppo.bench.overlap import OverlapMeasurements, measure_overlap, measured_layer
from sppo.bench.pcie import measure_pcie
from sppo.bench.timing import KernelBench, Rounds, Watcher
from sppo.config.run import RunConfig
from sppo.hardware.rates import ElementwisePoint, GemmPoint

_ROUNDS, _QUICK_ROUNDS = 5, 3


@dataclass(frozen=True, slots=True)
class Measurements:
    """Results of one run of the benchmarks; empty for subjects that were not requested.

    Attributes:
        device: "cpu" or "cuda".
        gemm: Rates of linear layers.
        attention: Rates of attention; None if not requested.
        elementwise: Rates of element-wise kernels, the loss and the optimizer.
        spreads: Difference between the fastest and slowest round of each timing, relative to the
            median.
        wall_s: Seconds of the whole run.
        copies: Copy measurements, one entry per tier behind the device.
        overlap: Copies that overlap with compute; None if not requested.
        messages: Messages between ranks on the CPU; None if not requested.
        documents: Attention over short documents, with attention on a CPU; None otherwise.
        rule: Rates of the gated delta rule; None if not requested.
    """

    device: str
    gemm: tuple[GemmPoint, ...] = ()
    attention: AttentionRates | None = None
    elementwise: tuple[ElementwisePoint, ...] = ()
    spreads: tuple[float, ...] = ()
    wall_s: float = 0.0
    copies: tuple[CopyMeasurements, ...] = ()
    overlap: OverlapMeasurements | None = None
    messages: MessageMeasurements | None = None
    documents: DocumentSeconds | None = None
    rule: RuleRates | None = None


def device_to_measure() -> str:
    """Return the device that torch can use on this machine: "cuda" if available, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Request to measure one device.

    Attributes:
        device: "cpu" or "cuda".
        quick: Measure fewer shapes and rounds, to test the benchmarks, not to plan with.
        run: Run in whose precision, and with whose model, to measure; None for common ones.
        directory: Directory on the disk to measure; None to measure host memory only.
    """

    device: str
    quick: bool
    run: RunConfig | None = None
    directory: Path | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types of weights and activations to measure with."""
        return ("bf16", "fp32") if self.run is None else (self.run.train.dtype,)


def measure(subjects: Sequence[str], request: BenchRequest, *, watcher: Watcher) -> Measurements:
    """Run the benchmarks named in ``subjects``, some of the names of :data:`_SUBJECTS`.

    Raises:
        ValueError: A directory that does not exist.
        OSError: A disk that lacks the space, or failed.
        MemoryError: A host that lacks the memory, or may not lock it.
    """
    start = time.perf_counter()
    rounds = Rounds(_QUICK_ROUNDS if request.quick else _ROUNDS)
    kernels = KernelBench(Operands(request.device), request.dtypes, rounds, watcher)
    found: dict[str, Any] = {}
    for subject in subjects:
        found |= _SUBJECTS[subject](kernels, request)
    measured = Measurements(request.device, **found)
    spreads = [*kernels.spreads]
    spreads += [point.spread for copies in measured.copies for point in copies.points]
    spreads += [] if measured.messages is None else [measured.messages.spread]
    spreads += [] if measured.overlap is None else [p.spread for p in measured.overlap.points]
    return replace(measured, spreads=tuple(spreads), wall_s=time.perf_counter() - start)


def _attention(kernels: KernelBench, request: BenchRequest) -> dict[str, Any]:
    model = None if request.run is None else request.run.model
    problems = attention_problems(request.device, kernels.dtypes, quick=request.quick, model=model)
    found: dict[str, Any] = {"attention": measure_attention(kernels, problems)}
    if request.device == "cpu":
        found["documents"] = measure_documents(kernels)
    return found


def _copies(kernels: KernelBench, request: BenchRequest) -> dict[str, Any]:
    """Measure copies to each available tier: host memory for a GPU, and a disk."""
    device, directory = request.device, request.directory
    quick, watcher = request.quick, kernels.watcher
    copies: list[CopyMeasurements] = []
    if device == "cuda":
        devices = [torch.device(device, index) for index in range(torch.cuda.device_count())]
        copies.append(measure_pcie(devices, quick=quick, watcher=watcher))
    if directory is not None:
        copies.append(measure_disk(directory, quick=quick, watcher=watcher))
    return {"copies": tuple(copies)}


def _overlap(kernels: KernelBench, request: BenchRequest) -> dict[str, Any]:
    overlap = measure_overlap(
        kernels.operands,
        measured_layer(request.device, request.run),
        directory=request.directory,
        quick=request.quick,
        watcher=kernels.watcher,
    )
    return {"overlap": overlap}


_SUBJECTS: Mapping[str, Callable[[KernelBench, BenchRequest], dict[str, Any]]] = {
    "gemm": lambda kernels, request: {"gemm": measure_gemm(kernels, quick=request.quick)},
    "attention": _attention,
    "elementwise": lambda kernels, request: {
        "elementwise": measure_elementwise(kernels, quick=request.quick)
    },
    "rule": lambda kernels, request: {"rule": measure_rule(kernels, quick=request.quick)},
    "messages": lambda kernels, request: {
        "messages": measure_messages(quick=request.quick, watcher=kernels.watcher)
    },
    "pcie": _copies,
    "overlap": _overlap,
}
"""Measurement of each subject, which returns fields of :class:`Measurements`."""
