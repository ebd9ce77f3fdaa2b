"""Hardware description in which measured rates replace assumed ones."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import torch

from sppo.bench.attention import AttentionRates
from sppo.bench.copies import CopyMeasurements
from sppo.bench.suite import Measurements
from sppo.hardware.description import DeviceSpec, HardwareSpec, NodeSpec, Provenance
from sppo.hardware.file import read_hardware
from sppo.hardware.rates import AttentionPoint, ElementwisePoint, GemmPoint
from sppo.hardware.this_machine import describe_cpu, detect_machine, usable_memory_bytes

_DTYPES = ("bf16", "fp32")
_P = TypeVar("_P", AttentionPoint, ElementwisePoint, GemmPoint)


def described_machine(device: str) -> HardwareSpec:
    """Return the description of this machine before measuring, with the device to measure.

    A CPU has as many multiprocessors as torch has threads, the number for which rates are measured.

    Args:
        device: Device that torch runs on, "cpu" or "cuda".

    Raises:
        ValueError: A GPU that cannot be identified.
    """
    detected = detect_machine()
    if device == "cpu":
        if detected.device.kind != device:  # the GPU is hidden, or torch was built without CUDA
            detected = describe_cpu(usable_memory_bytes())
        threads = torch.get_num_threads()
        return replace(detected, device=replace(detected.device, num_multiprocessors=threads))
    if detected.device.kind == device:
        return detected
    raise ValueError(
        "torch runs on a GPU here, and nothing tells which: pip install nvidia-ml-py, or hide the "
        "GPU with CUDA_VISIBLE_DEVICES= to measure the CPU"
    )


def starting_description(detected: HardwareSpec, *, path: Path | None) -> HardwareSpec:
    """Return the description to merge measurements into: the existing file, or ``detected``.

    Subjects can therefore be measured one at a time, and manual edits of the file are kept.

    Raises:
        ValueError: A file that is no hardware description, or describes another machine or another
            number of threads.
        OSError: A file that cannot be read.
    """
    if path is None or not path.exists():
        return detected
    spec = read_hardware(path)
    if spec.name != detected.name:
        raise ValueError(
            f"{path} describes {spec.name!r} and this machine is {detected.name!r}: choose another "
            "file, or delete that one"
        )
    threads, here = spec.device.num_multiprocessors, detected.device.num_multiprocessors
    if spec.device.kind == "cpu" and threads != here:
        raise ValueError(
            f"{path} holds rates of {threads} threads and torch has {here} here: set "
            f"OMP_NUM_THREADS={threads}, choose another file, or delete that one"
        )
    return spec


def describe(base: HardwareSpec, measurements: Measurements) -> HardwareSpec:
    """Return ``base`` with measured points and their peaks, and rates of copies and messages.

    The provenance is "measured" if there are points of matrix products, attention and element-wise
    kernels, else "calibrated".
    """
    device = base.device
    if measurements.gemm:
        device = _with_gemm(device, measurements.gemm)
    if measurements.attention is not None:
        device = _with_attention(device, measurements.attention)
    if measurements.documents is not None:
        device = replace(
            device,
            document_forward_s=measurements.documents.forward_s,
            document_backward_s=measurements.documents.backward_s,
        )
    if measurements.rule is not None:
        device = replace(device, **asdict(measurements.rule))
    if measurements.elementwise:
        device = _with_elementwise(device, measurements.elementwise)
    node = base.node
    for copies in measurements.copies:
        node = _with_copies(node, copies)
    if measurements.overlap is not None:
        node = replace(node, copy_compute_s_per_byte=measurements.overlap.added_s_per_byte)
    network = base.network
    if measurements.messages is not None:
        network = replace(
            network,
            intra_node_bytes_per_s=measurements.messages.bytes_per_s,
            intra_node_latency_s=measurements.messages.latency_s,
            message_compute_s_per_byte=measurements.messages.compute_s_per_byte,
        )
    complete = device.gemm_points and device.attention_points and device.elementwise_points
    provenance: Provenance = "measured" if complete else "calibrated"
    return replace(base, device=device, node=node, network=network, provenance=provenance)


def _with_copies(node: NodeSpec, copies: CopyMeasurements) -> NodeSpec:
    """Return ``node`` with the planned rates of copies, with both directions busy and alone."""
    planned = copies.planned
    if copies.tier == "disk":
        return replace(
            node,
            disk_bytes=copies.room_bytes,
            disk_write_bytes_per_s=planned.out_bytes_per_s,
            disk_read_bytes_per_s=planned.back_bytes_per_s,
        )
    return replace(
        node,
        d2h_bytes_per_s=planned.out_bytes_per_s,
        h2d_bytes_per_s=planned.back_bytes_per_s,
        d2h_alone_bytes_per_s=planned.out_alone_bytes_per_s,
        h2d_alone_bytes_per_s=planned.back_alone_bytes_per_s,
    )


def _merged(old: tuple[_P, ...], new: tuple[_P, ...]) -> tuple[_P, ...]:
    """Return the old points of dtypes that were not measured, and the new points."""
    dtypes = {point.dtype for point in new}
    return tuple(point for point in old if point.dtype not in dtypes) + new


def _with_gemm(device: DeviceSpec, points: tuple[GemmPoint, ...]) -> DeviceSpec:
    """Return ``device`` with rates of products; the best is a GPU's efficiency or a CPU's peak."""
    device = replace(device, gemm_points=_merged(device.gemm_points, points))
    best = {
        dtype: max(p.forward_flops_per_s for p in points if p.dtype == dtype)
        for dtype in {point.dtype for point in points}
    }
    if device.kind == "cuda":
        dtype = "bf16" if "bf16" in best else "fp32"
        return replace(device, gemm_efficiency=min(1.0, best[dtype] / device.flops_per_s(dtype)))
    attained = {d: device.flops_per_s(d) * device.gemm_efficiency for d in _DTYPES} | best
    return replace(
        device,
        bf16_flops_per_s=attained["bf16"],
        fp32_flops_per_s=attained["fp32"],
        gemm_efficiency=1.0,
    )


def _with_attention(device: DeviceSpec, measured: AttentionRates) -> DeviceSpec:
    """Return ``device`` with the rates of attention, and the back end of a GPU's rates.

    The best rates become its efficiencies. Rates in bf16 count if there are some.
    """
    dtype = "bf16" if any(of == "bf16" for of, _ in measured.backends) else "fp32"
    peak = device.flops_per_s(dtype)
    chosen = [point for point in measured.points if point.dtype == dtype]
    backend = device.attention_backend
    if device.kind == "cuda":
        backend = next(name for (of, _), name in measured.backends.items() if of == dtype)
    return replace(
        device,
        attention_points=_merged(device.attention_points, measured.points),
        attention_efficiency=min(1.0, max(p.forward_flops_per_s for p in chosen) / peak),
        attention_backward_efficiency=min(1.0, max(p.backward_flops_per_s for p in chosen) / peak),
        attention_backend=backend,
    )


def _with_elementwise(device: DeviceSpec, points: tuple[ElementwisePoint, ...]) -> DeviceSpec:
    """Return ``device`` with the rates of kernels, that of the largest copies as its bandwidth.

    The fixed cost of a kernel becomes 0: measured rates include it on a CPU, and a GPU's kernels
    are queued while others run, in measurements as in training.
    """
    copies = [point for point in points if point.kernel == "copy"]
    largest = max(copies, key=lambda point: (point.elements, point.bytes_per_s))
    return replace(
        device,
        elementwise_points=_merged(device.elementwise_points, points),
        memory_bytes_per_s=largest.bytes_per_s,
        kernel_s=0.0,
    )
