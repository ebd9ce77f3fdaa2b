"""Detection of the machine this process runs on, without measuring.

An NVIDIA GPU is matched with the preset of its name; device memory, device count and host memory
are read from the machine. On any other machine the CPU is the device, and the machine's memory is
device memory. Rates are those of the preset, *analytic*, until `sppo bench` measures them. The same
machine always gives the same description: nothing in it depends on current load.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from sppo.hardware.control_groups import memory_limits
from sppo.hardware.description import HardwareSpec
from sppo.hardware.presets import PRESETS
from sppo.hardware.rates import AttentionPoint, ElementwisePoint, GemmPoint

Point = TypeVar("Point", GemmPoint, AttentionPoint, ElementwisePoint)

_CPU_INFO = Path("/proc/cpuinfo")
_NODES = Path("/sys/devices/system/node")
_HALF_FLAGS = frozenset(("avx512vl", "avx512bw", "avx512dq"))
"""x86 instruction sets with which oneDNN multiplies bf16 matrices, as torch checks."""


def detect_machine() -> HardwareSpec:
    """Return this machine's description with the analytic rates of the preset nearest to it."""
    gpus, host_bytes = find_gpus(), usable_memory_bytes()
    if gpus is None:
        return describe_cpu(host_bytes)
    name, count, memory_bytes = gpus
    return describe_gpus(name, count=count, memory_bytes=memory_bytes, host_bytes=host_bytes)


def describe_gpus(name: str, *, count: int, memory_bytes: int, host_bytes: int) -> HardwareSpec:
    """Return the description of a node of equal GPUs.

    Its rates are those of the preset nearest to the GPU, by name, else by memory.

    Args:
        name: Name that the driver reports, e.g. ``NVIDIA H200``.
        count: Number of GPUs.
        memory_bytes: Memory of each GPU.
        host_bytes: Host memory of the node.
    """
    accelerators = [spec for spec in PRESETS.values() if spec.device.kind == "cuda"]
    name_parts = set(re.findall(r"[a-z]+\d+", name.lower()))
    named = [spec for spec in accelerators if spec.name.partition("-")[0] in name_parts]
    preset = min(
        named or accelerators, key=lambda spec: abs(spec.device.memory_bytes - memory_bytes)
    )
    how = f"preset {preset.name}" if named else f"unknown, nearest by memory: {preset.name}"
    return replace(
        preset,
        name=f"{count} x {name} ({how})",
        device=replace(preset.device, memory_bytes=memory_bytes),
        node=replace(
            preset.node,
            num_devices=count,
            host_memory_bytes=host_bytes,
            numa_nodes=count_numa_nodes(),
        ),
    )


def describe_cpu(memory_bytes: int) -> HardwareSpec:
    """Return a description with this machine's CPU as a device of ``memory_bytes`` of memory."""
    preset, cores = PRESETS["laptop-cpu"], count_cores()
    device = preset.device
    fraction = cores / device.num_multiprocessors
    return replace(
        preset,
        name=f"{cpu_model()}, {cores} core{'' if cores == 1 else 's'} (preset {preset.name})",
        device=replace(
            device,
            memory_bytes=memory_bytes,
            # Reserve at most half of the memory of a small machine.
            reserved_bytes=min(device.reserved_bytes, memory_bytes // 2),
            num_multiprocessors=cores,
            bf16_flops_per_s=device.bf16_flops_per_s * fraction,
            fp32_flops_per_s=device.fp32_flops_per_s * fraction,
            half_products=has_half_products(),
        ),
        node=replace(preset.node, numa_nodes=count_numa_nodes()),
    )


def has_half_products() -> bool:
    """Return whether oneDNN multiplies bf16 matrices on this CPU; True if the system hides it."""
    flags = _cpu_info("flags")
    return flags is None or {*flags.split()} >= _HALF_FLAGS


def divide_cpu(
    hardware: HardwareSpec, ranks: int, *, threads: int | None = None, cores: int | None = None
) -> HardwareSpec:
    """Return a machine with each CPU divided among `ranks` processes, each a device with a share.

    Rates hold for the number of threads they were measured with (``num_multiprocessors``). The rate
    of a process is proportional to its threads, and lower where threads outnumber cores. A GPU
    machine is returned unchanged.

    Args:
        hardware: Machine to divide.
        ranks: Number of processes of each CPU.
        threads: Threads of each process; if None, the threads that rates hold for divided by
            `ranks`.
        cores: Cores of the machine; if None, as many as the threads that rates hold for.
    """
    device = hardware.device
    measured = device.num_multiprocessors
    own = threads or max(1, measured // ranks)
    slower = measured / own * max(1.0, own * ranks / (cores or measured))
    if device.kind != "cpu" or (ranks == 1 and own == measured):
        return hardware
    return replace(
        hardware,
        device=replace(
            device,
            memory_bytes=max(1, device.memory_bytes // ranks),
            reserved_bytes=device.reserved_bytes // ranks,
            bf16_flops_per_s=device.bf16_flops_per_s / slower,
            fp32_flops_per_s=device.fp32_flops_per_s / slower,
            num_multiprocessors=own,
            memory_bytes_per_s=device.memory_bytes_per_s / slower,
            gemm_points=tuple(_slower(point, slower) for point in device.gemm_points),
            attention_points=tuple(_slower(point, slower) for point in device.attention_points),
            elementwise_points=tuple(_slower(point, slower) for point in device.elementwise_points),
        ),
        node=replace(hardware.node, num_devices=hardware.node.num_devices * ranks),
    )


def as_seen_by_ranks(hardware: HardwareSpec, ranks: int, *, is_here: bool) -> HardwareSpec:
    """Return the machine that the ranks of a run see: CPUs divided evenly among the ranks.

    Measured rates hold for a number of threads, which processes on this machine may exceed or fall
    short of. Of another machine, processes are taken to share the threads of its rates. A GPU
    machine is returned unchanged.

    Args:
        hardware: Machine on which the ranks run, each of its nodes alike.
        ranks: Number of ranks on all nodes.
        is_here: Whether the nodes are this machine or like it.
    """
    of_each = -(-ranks // hardware.num_devices)
    if not is_here or not hardware.device.gemm_points:
        return divide_cpu(hardware, of_each)
    return divide_cpu(hardware, of_each, threads=threads_of_rank(of_each), cores=count_cores())


def threads_of_rank(ranks: int, *, environ: Mapping[str, str] = os.environ) -> int:
    """Return the threads of each of `ranks` processes: OMP_NUM_THREADS, or a share of the cores."""
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(given) if given.isdecimal() and int(given) else max(1, count_cores() // ranks)


def _slower(point: Point, times: float) -> Point:
    """Return `point` with every rate divided by `times`."""
    rates = {f.name: getattr(point, f.name) for f in fields(point) if f.name.endswith("_per_s")}
    return replace(point, **{name: rate / times for name, rate in rates.items()})


def find_gpus() -> tuple[str, int, int] | None:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES says.

    Returns:
        The name of the first, the number, and the memory of the first in bytes: all are assumed
        equal. None without GPU, driver or Python binding.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            handles = _visible_gpus(pynvml)
            if not handles:
                return None
            memory = pynvml.nvmlDeviceGetMemoryInfo(handles[0])
            return pynvml.nvmlDeviceGetName(handles[0]), len(handles), int(memory.total)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _visible_gpus(nvml: Any) -> list[Any]:
    """Return the handles of the GPUs that CUDA shows: all, or those of CUDA_VISIBLE_DEVICES.

    The variable lists indices, beginnings of UUIDs, or instances of a GPU (MIG), and ends at the
    first one that does not exist. NVML itself ignores it.
    """
    gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(int(nvml.nvmlDeviceGetCount()))]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return gpus
    found = []
    for name in map(str.strip, listed.split(",")):
        named = [gpu for gpu in gpus if name and nvml.nvmlDeviceGetUUID(gpu).startswith(name)]
        if name.isdecimal():
            named = gpus[int(name) :][:1]
        elif name.startswith("MIG-"):
            with suppress(nvml.NVMLError):
                named = [nvml.nvmlDeviceGetHandleByUUID(name)]
        if len(named) != 1:
            break
        found += named
    return found


def cpu_model() -> str:
    """Return the name that the CPU gives itself, or the architecture where it gives none."""
    name = _cpu_info("model name") or platform.processor() or platform.machine() or "CPU"
    return " ".join(name.split())


def _cpu_info(field: str) -> str | None:
    """Return what the system says about the first CPU; None if it does not."""
    try:
        found = re.search(rf"^{field}\s*:\s*(\S.*)$", _CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found and found[1]


def count_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_numa_nodes(*, nodes: Path = _NODES) -> int:
    """Return the number of NUMA nodes of the machine, at least 1."""
    return max(1, len(list(nodes.glob("node[0-9]*"))))


def usable_memory_bytes() -> int:
    """Return the memory of the machine, or the limit of this process's control group if lower."""
    limit = control_group_limit_bytes()
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def control_group_limit_bytes() -> int | None:
    """Return the lowest memory limit of this process's control groups, or None without a limit."""
    return min((limit for limit, _ in memory_limits()), default=None)
