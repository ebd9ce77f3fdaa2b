"""Findings of ``sppo doctor``: what planning and training find on this machine, and advice."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sppo.quoting import quoted
from sppo.units import GIB, MIB, counted, format_bytes

State = Literal["ok", "note", "missing", "broken"]
"""State of a finding. ok: present and used; note: something to know; missing: not present, so that
a feature is lost; broken: present and not working."""

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 64 * MIB
_LEAST_DISK_BYTES = GIB
_MANY_RANKS = 64
_HEAD_SIZE, _GROUP = 128, 4
"""Head size, and query heads per key/value head, of the attention case that back ends are checked
on."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        subject: Group of the check, e.g. "GPU".
        name: Name of the check.
        state: State of what was checked.
        found: Text about what was found.
        advice: What to do about it; "" if nothing needs to be done.
    """

    subject: str
    name: str
    state: State
    found: str
    advice: str = ""


def examine(hardware: Path | None = None) -> tuple[Finding, ...]:
    """Return the findings on this machine; nothing is measured or downloaded.

    Native libraries of SPPO that are missing are built. A check that fails, in whatever way, is a
    finding and hides no other.

    Args:
        hardware: File of ``sppo bench`` whose figures are reported as well.
    """
    looks: Mapping[str, Callable[[], Iterator[Finding]]] = {
        "the machine": _machine,
        "limits": _limits,
        "packages": _packages,
        "native parts": _native_parts,
        "GPUs": _gpu,
        "attention": _attention,
        "measured rates": lambda: _measured(hardware),
    }
    return tuple(finding for what, look in looks.items() for finding in _guarded(what, look))


_ANYTHING = (Exception, SystemExit)
"""Errors that the import of a broken package may raise."""


def _guarded(what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a look at `what`; an error that ends it is the last of them."""
    try:
        yield from look()
    except _ANYTHING as error:
        package = (getattr(error, "name", None) or "").split(".")[0]
        advice = "install the package that fails again"
        if package:
            advice = f"install it again: pip install --force-reinstall {package}"
        yield Finding("packages", package or f"look at {what}", "broken", _said(error), advice)


def _said(error: BaseException) -> str:
    return f"cannot be used: {type(error).__name__}: {error}"


def _machine() -> Iterator[Finding]:
    """Yield findings about processor, memory, NUMA nodes and disk."""
    from sppo.hardware.this_machine import (
        control_group_limit_bytes,
        count_cores,
        count_numa_nodes,
        cpu_model,
        usable_memory_bytes,
    )

    subject = "machine"
    cores, all_cores = count_cores(), os.cpu_count() or 1
    number = counted(cores, "core") if cores == all_cores else f"{cores} of {all_cores} cores"
    yield Finding(subject, "processor", "ok", f"{cpu_model()}, {number}")
    yield _threads(cores)
    limit = control_group_limit_bytes()
    group = "" if limit is None else f" (limit of the control group: {format_bytes(limit)})"
    yield Finding(subject, "memory", "ok", f"{format_bytes(usable_memory_bytes())}{group}")
    nodes = count_numa_nodes()
    yield Finding(subject, "NUMA", "ok", counted(nodes, "memory node"))
    yield _disk()
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    yield Finding(subject, "system", "ok", system)


def _threads(cores: int) -> Finding:
    """Return the finding about OMP_NUM_THREADS, the number of threads that torch may use."""
    given = os.environ.get("OMP_NUM_THREADS")
    subject, name = "machine", "threads"
    if given is None:
        return Finding(subject, name, "ok", f"OMP_NUM_THREADS is not set: torch takes {cores}")
    outer = given.split(",")[0].strip()  # the other numbers are for nested parallelism
    if not outer.isdecimal() or not 1 <= int(outer) <= cores:
        return Finding(
            subject,
            name,
            "note",
            f"OMP_NUM_THREADS={quoted(given)}, and there are {cores} cores",
            f"unset it, or write a number from 1 to {cores}",
        )
    advice = f"unset it to train one rank on all {cores} cores" if int(outer) < cores else ""
    state: State = "note" if advice else "ok"
    return Finding(subject, name, state, f"OMP_NUM_THREADS={given}", advice)


def _disk() -> Finding:
    """Return the finding about free space in the working directory, where runs write by default."""
    subject, name = "machine", "disk space"
    try:
        directory, room = Path.cwd(), os.statvfs(".")
    except OSError as error:
        found = f"the working directory cannot be read: {error.strerror}"
        return Finding(subject, name, "note", found, "change to another")
    free = room.f_bavail * room.f_frsize
    found = f"{format_bytes(free)} free in {directory}"
    if free >= _LEAST_DISK_BYTES:
        return Finding(subject, name, "ok", found)
    advice = "checkpoints and a disk tier need more: free some space, or work on another disk"
    return Finding(subject, name, "note", found, advice)


def _limits() -> Iterator[Finding]:
    """Yield findings about limits that a run with many ranks, or on a GPU, may reach."""
    from sppo.kernels.native.machine_memory import LIBRARY_ADDRESS_BYTES, address_room
    from sppo.parallel.job.open_files import files_of_a_rank

    subject = "limits"
    unlimited = resource.RLIM_INFINITY
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_of_a_rank(_MANY_RANKS)
    enough = files == unlimited or files >= needed
    yield Finding(
        subject,
        "open files",
        "ok" if enough else "note",
        "unlimited" if files == unlimited else f"{files} at most",
        "" if enough else f"a rank of {_MANY_RANKS} opens about {needed}: raise it (ulimit -Hn)",
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    few = locked != unlimited and locked < GIB
    yield Finding(
        subject,
        "locked memory",
        "note" if few else "ok",
        "unlimited" if locked == unlimited else f"{format_bytes(locked)} at most",
        "enough for page-locked host memory, which the driver locks; InfiniBand needs more: "
        "ulimit -l unlimited"
        if few
        else "",
    )
    addresses = address_room()
    if addresses is not None:
        few = addresses < LIBRARY_ADDRESS_BYTES
        advice = "weights, activations and libraries need them: raise it (ulimit -v, ulimit -d)"
        found = f"{format_bytes(addresses)} left to a process"
        yield Finding(subject, "addresses", "broken" if few else "note", found, advice)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != unlimited:
        advice = "a disk tier and checkpoints are files: raise it (ulimit -f) if they are larger"
        yield Finding(subject, "file size", "note", f"{format_bytes(size)} at most", advice)
    yield _shared_memory()


def _shared_memory() -> Finding:
    subject, name = "limits", "shared memory"
    try:
        room = os.statvfs(_SHARED_MEMORY)
    except OSError:
        found, advice = f"no {_SHARED_MEMORY}", "NCCL between GPUs of a machine needs it: mount it"
        return Finding(subject, name, "note", found, advice)
    free = room.f_bavail * room.f_frsize
    found = f"{format_bytes(free)} free in {_SHARED_MEMORY}"
    if free >= _LEAST_SHARED_BYTES:
        return Finding(subject, name, "ok", found)
    advice = "NCCL between GPUs of a machine needs more: in a container start it with --shm-size=1g"
    return Finding(subject, name, "note", found, advice)


_OPTIONAL = (
    ("triton", "triton", "GPU kernels of SPPO; without it a GPU runs slower ones of torch"),
    ("flash-attn", "flash-attn", "attention on a GPU before Hopper; torch has its own copy"),
    ("pynvml", "nvidia-ml-py", "finds out which GPU this is; without it the plan assumes one"),
    ("tokenizers", "tokenizers", "reads tokenizer.json"),
    ("tensorboard", "tensorboard", "writes what train.tensorboard=true asks for"),
    ("ipywidgets", "ipywidgets", "bars in a notebook; without it lines"),
)
"""Name, distribution and use of optional packages."""


def _packages() -> Iterator[Finding]:
    """Yield findings about SPPO, torch and optional packages."""
    subject = "packages"
    from sppo.version import __version__

    yield Finding(subject, "sppo", "ok", __version__)
    try:
        torch = _torch()
    except MemoryError as error:
        yield Finding(subject, "torch", "broken", "there is no room to load it", str(error))
        return
    except _ANYTHING as error:
        advice = "install it again: pip install --force-reinstall torch"
        yield Finding(subject, "torch", "broken", _said(error), advice)
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding(subject, "torch", "ok", f"{torch.__version__} ({built})")
    for name, distribution, use in _OPTIONAL:
        yield _optional(name, distribution, use)


def _optional(name: str, distribution: str, use: str) -> Finding:
    """Return the finding about an optional package, which is imported."""
    module = name.replace("-", "_")
    try:
        importlib.import_module(module)
        return Finding("packages", name, "ok", importlib.metadata.version(distribution))
    except _ANYTHING as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (module, distribution):
            advice = f"{use}: pip install {distribution}"
            return Finding("packages", name, "missing", "not installed", advice)
        advice = f"install it again: pip install --force-reinstall {distribution}"
        return Finding("packages", name, "broken", _said(error), advice)


def _torch_works() -> bool:
    try:
        _torch()
    except _ANYTHING:
        return False
    return True


def _torch() -> Any:
    """Import torch after a check of free memory: without memory the import kills the process.

    Raises:
        MemoryError: There is too little memory.
        BaseException: Anything, if the installation of torch is missing or damaged.
    """
    from sppo.kernels.native.machine_memory import check_room_for_libraries

    if "torch" not in sys.modules:
        check_room_for_libraries()
    import torch

    return torch


def _native_parts() -> Iterator[Finding]:
    """Yield findings about the native libraries; one that is missing is compiled now."""
    from sppo import native_build
    from sppo.kernels.native.extension import describe, native_library

    subject = "native parts"
    native_build.forget_failures()
    again = "once the reason is mended, sppo doctor builds it"
    state: State = "ok" if native_library() is not None else "missing"
    advice = "" if state == "ok" else f"host memory and files are slower: {again}"
    yield Finding(subject, "host library", state, describe(), advice)
    if not _torch_works():
        yield Finding(subject, "memory pool", "missing", "it works with torch alone", "mend torch")
        return
    from sppo.kernels.native.cpu_allocator import describe_cpu_allocator, install_cpu_allocator

    pool = install_cpu_allocator() is not None
    found = describe_cpu_allocator()
    advice = "" if pool else f"memory of CPU runs is less exact: {again}"
    yield Finding(subject, "memory pool", "ok" if pool else "missing", found, advice)


def _gpu() -> Iterator[Finding]:
    """Yield findings about GPUs, and about what a run on a GPU lacks."""
    if not _torch_works():
        return
    torch = _torch()
    subject = "GPU"
    if torch.version.cuda is None:
        advice = "to train on a GPU, install a torch with CUDA on a machine with one"
        yield Finding(subject, "CUDA", "missing", "this torch was built without it", advice)
    elif not torch.cuda.is_available():
        advice = "nvidia-smi says whether the driver sees one; CUDA_VISIBLE_DEVICES may hide it"
        yield Finding(subject, "CUDA", "missing", "torch sees no GPU", advice)
    else:
        yield from _visible_gpus()
        return
    found = "training runs on the CPU; plans for GPUs need none (hardware.preset)"
    yield Finding(subject, "training", "note", found)


def _visible_gpus() -> Iterator[Finding]:
    """Yield findings about the GPUs that torch sees, and NCCL."""
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found = (
            f"{properties.name}, {format_bytes(properties.total_memory)}, compute capability "
            f"{properties.major}.{properties.minor}"
        )
        yield Finding("GPU", f"cuda:{index}", "ok", found)
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    advice = "" if nccl else "runs on several GPUs need a torch with NCCL"
    yield Finding("GPU", "NCCL", "ok" if nccl else "missing", "there" if nccl else "none", advice)


def _attention() -> Iterator[Finding]:
    """Yield findings about attention back ends, in order of preference on the device of a run."""
    if not _torch_works():
        return
    torch = _torch()
    from sppo.kernels.attention.choice import (
        CAPABILITIES,
        AttentionCase,
        chosen_name,
        is_installed,
        preference,
        why_not,
    )
    from sppo.kernels.half_products import needs_casts

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = AttentionCase(device, torch.bfloat16, _HEAD_SIZE, _GROUP, window=False)
    subject = f"attention ({device.type}, bf16)"
    chosen = chosen_name("auto", case)
    names = [name for name in preference(device) if CAPABILITIES[name].automatic]
    for name in names:
        if device.type not in CAPABILITIES[name].devices:
            continue
        reason = why_not(name, case)
        found = "taken by auto" if name == chosen else (reason or "there")
        yield Finding(subject, name, "ok" if reason is None else "missing", found)
    if device.type == "cpu":
        if torch.version.cuda is None:
            yield Finding("attention (cuda)", "on a GPU", "missing", "needs a torch with CUDA")
        else:
            modules = {name: CAPABILITIES[name].module for name in names}
            there = [name for name, of in modules.items() if of is None or is_installed(of)]
            yield _on_a_gpu([name for name in there if "cuda" in CAPABILITIES[name].devices])
        yield _half_products(needs_casts(torch.empty(1, dtype=torch.bfloat16)))


def _on_a_gpu(names: list[str]) -> Finding:
    found = f"{', '.join(names)} are installed"
    return Finding(
        "attention (cuda)", "on a GPU", "note", found, "which of them runs, a GPU decides"
    )


def _half_products(casts: bool) -> Finding:
    found = "multiplied in fp32, tile by tile" if casts else "the processor multiplies them itself"
    advice = "train.dtype=fp32 is as fast here" if casts else ""
    return Finding("arithmetic", "bf16 on the CPU", "note" if casts else "ok", found, advice)


def _measured(hardware: Path | None) -> Iterator[Finding]:
    """Yield findings about the figures in a file of ``sppo bench``."""
    subject, bench = "measured", "sppo bench all -o hardware.json (two minutes)"
    if hardware is None:
        advice = f"plans for this machine use a preset until it is measured: {bench}"
        yield Finding(subject, "rates", "missing", "no file was named (--hardware FILE)", advice)
        return
    from sppo.hardware.file import read_hardware

    try:
        spec = read_hardware(hardware)
    except (OSError, ValueError) as error:
        found = f"{hardware}: {error.strerror}" if isinstance(error, OSError) else str(error)
        yield Finding(subject, "rates", "broken", found, f"name another file, or measure: {bench}")
        return
    yield Finding(subject, "rates", "ok", f"{spec.shown_name}: {spec.provenance}, in {hardware}")
    device, node = spec.device, spec.node
    dtypes = sorted({point.dtype for point in device.gemm_points})
    rates = [f"{device.flops_per_s(dtype) / 1e12:.3g} TFLOP/s in {dtype}" for dtype in dtypes]
    yield Finding(
        subject, "products", "ok", f"at most {', '.join(rates)}" if rates else "a preset's"
    )
    network = spec.network
    if network.message_compute_s_per_byte:
        found = (
            f"{network.intra_node_bytes_per_s / 1e9:.2f} GB/s between ranks; a byte takes "
            f"{network.message_compute_s_per_byte * 1e9:.2f} ns of compute on each end"
        )
        yield Finding(subject, "messages", "ok", found)
    if node.disk_bytes and node.disk_write_bytes_per_s:
        found = (
            f"{node.disk_write_bytes_per_s / 1e9:.2f} GB/s written, "
            f"{node.disk_read_bytes_per_s / 1e9:.2f} GB/s read"
        )
        yield Finding(subject, "disk", "ok", found)
    if node.host_memory_bytes and node.d2h_bytes_per_s:
        found = (
            f"{node.d2h_bytes_per_s / 1e9:.1f} GB/s to the host, "
            f"{node.h2d_bytes_per_s / 1e9:.1f} GB/s back"
        )
        yield Finding(subject, "host copies", "ok", found)
