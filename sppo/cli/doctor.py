"""``sppo doctor``: report what this machine offers and how to add what is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sppo import native_build
from sppo.cli.arguments.common import Json
from sppo.cli.exit_codes import FAULT, exit_codes
from sppo.cli.output.printing import print_json
from sppo.hardware import this_machine
from sppo.hardware.file import read_hardware
from sppo.kernels.native.machine_memory import (
    LIBRARY_ADDRESS_BYTES,
    address_room,
    check_room_for_libraries,
)
from sppo.parallel.job.open_files import files_of_a_rank
from sppo.quoting import quoted
from sppo.units import GIB, MIB, counted, format_bytes
from sppo.version import __version__

State = Literal["ok", "note", "missing", "broken"]
"""State of a finding. ok: present and used; note: something to know; missing: not present, so that
a feature is lost; broken: present and not working."""

_SIGNS = {"ok": "ok", "note": "note", "missing": "-", "broken": "BROKEN"}
_LEAST_COLUMNS = 40
"""Smallest width of a table. A narrower terminal wraps lines itself."""
_MANY_RANKS = 64
_HEAD_SIZE, _GROUP = 128, 4
"""Head size, and query heads per key/value head, of the attention case that back ends are checked
on."""
_PACKAGES = ("torch", "triton", "flash-attn", "numpy")
"""Packages whose versions are a part of ``sppo --version``."""
_OPTIONAL = (
    ("triton", "triton", "GPU kernels of SPPO; without it a GPU runs slower ones of torch"),
    ("flash-attn", "flash-attn", "attention on a GPU before Hopper; torch has its own copy"),
    ("pynvml", "nvidia-ml-py", "finds out which GPU this is; without it the plan assumes one"),
    ("tokenizers", "tokenizers", "reads tokenizer.json"),
    ("tensorboard", "tensorboard", "writes what train.tensorboard=true asks for"),
    ("ipywidgets", "ipywidgets", "bars in a notebook; without it lines"),
)
"""Name, distribution and use of optional packages."""


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


def doctor(
    hardware: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file of sppo bench, to show what was measured."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Report what training and planning find on this machine, and how to add what is missing.

    Nothing is measured or downloaded; SPPO's memory pool is built if it is missing. Exit code 1:
    something that is installed does not work, or FILE cannot be used.

        sppo doctor
        sppo doctor --hardware hardware.json --json
    """
    with exit_codes():
        findings = examine(hardware)
    if json_output:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(FAULT)


def version_lines() -> tuple[str, ...]:
    """Return lines with the version, then Python and packages, then the memory pool."""
    packages = (f"{name} {_version(name)}" for name in _PACKAGES)
    pool = "built" if native_build.find() is not None else "built when first used"
    return (
        f"sppo {__version__}",
        f"Python {platform.python_version()}, {', '.join(packages)}",
        f"memory pool: {pool}",
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _show(findings: tuple[Finding, ...]) -> None:
    """Print a table for each subject, with the advice below each finding."""
    console = Console()
    console.width = max(console.width, _LEAST_COLUMNS)
    for subject, group in groupby(findings, key=lambda finding: finding.subject):
        console.print(Text(subject, style="bold"))
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(no_wrap=True, min_width=6)
        table.add_column(no_wrap=True, min_width=14)
        table.add_column(overflow="fold")
        for finding in group:
            text = f"{finding.found}\n{finding.advice}".rstrip()
            table.add_row(_SIGNS[finding.state], Text(finding.name), Text(text))
        console.print(table)


def examine(hardware: Path | None = None) -> tuple[Finding, ...]:
    """Return the findings on this machine; nothing is measured or downloaded.

    The memory pool is built if it is missing. A check that fails, in whatever way, is a finding and
    hides no other.

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
    cores, all_cores = this_machine.count_cores(), os.cpu_count() or 1
    limit = this_machine.control_group_limit_bytes()
    found = {
        "processor": f"{this_machine.cpu_model()}, "
        + (counted(cores, "core") if cores == all_cores else f"{cores} of {all_cores} cores"),
        "memory": format_bytes(this_machine.usable_memory_bytes())
        + ("" if limit is None else f" (limit of the control group: {format_bytes(limit)})"),
        "NUMA": counted(this_machine.count_numa_nodes(), "memory node"),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }
    for name, text in found.items():
        yield Finding("machine", name, "ok", text)
    yield _threads(cores)
    few = "checkpoints and a disk tier need more: free some space, or work on another disk"
    yield _room("machine", "disk space", Path(), least=GIB, few=few, none="change to another")


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


def _room(subject: str, name: str, directory: Path, *, least: int, few: str, none: str) -> Finding:
    """Return the finding about the free space in a directory.

    Args:
        subject: Group of the check.
        name: Name of the check.
        directory: Directory to look at.
        least: Bytes that should be free.
        few: What to do if fewer are.
        none: What to do if the directory is not there or cannot be read.
    """
    try:
        path, room = directory.absolute(), os.statvfs(directory)
    except OSError as error:
        where = directory if directory.parts else "the working directory"
        return Finding(subject, name, "note", f"{where} cannot be read: {error.strerror}", none)
    free = room.f_bavail * room.f_frsize
    found = f"{format_bytes(free)} free in {path}"
    return Finding(subject, name, *(("ok", found, "") if free >= least else ("note", found, few)))


def _limits() -> Iterator[Finding]:
    """Yield findings about limits that a run with many ranks, or on a GPU, may reach."""
    needed = files_of_a_rank(_MANY_RANKS)
    advice = f"a rank of {_MANY_RANKS} opens about {needed}: raise it (ulimit -Hn)"
    yield _limit("open files", resource.RLIMIT_NOFILE, least=needed, text=str, advice=advice)
    advice = (
        "enough for page-locked host memory, which the driver locks; InfiniBand needs more: "
        "ulimit -l unlimited"
    )
    yield _limit("locked memory", resource.RLIMIT_MEMLOCK, least=GIB, advice=advice)
    addresses = address_room()
    if addresses is not None:
        advice = "weights, activations and libraries need them: raise it (ulimit -v, ulimit -d)"
        state: State = "broken" if addresses < LIBRARY_ADDRESS_BYTES else "note"
        found = f"{format_bytes(addresses)} left to a process"
        yield Finding("limits", "addresses", state, found, advice)
    advice = "a disk tier and checkpoints are files: raise it (ulimit -f) if they are larger"
    yield _limit("file size", resource.RLIMIT_FSIZE, least=None, advice=advice)
    few = "NCCL between GPUs of a machine needs more: in a container start it with --shm-size=1g"
    none = "NCCL between GPUs of a machine needs it: mount it"
    directory = Path("/dev/shm")
    yield _room("limits", "shared memory", directory, least=64 * MIB, few=few, none=none)


def _limit(
    name: str,
    kind: int,
    *,
    least: int | None,
    advice: str,
    text: Callable[[int], str] = format_bytes,
) -> Finding:
    """Return the finding about a limit of the process, with advice if it is below `least`.

    Args:
        name: Name of the check.
        kind: Limit, of :mod:`resource`.
        least: Limit that is high enough; None if only no limit is.
        advice: What to do if it is lower.
        text: Function that formats the limit.
    """
    _, most = resource.getrlimit(kind)
    if most == resource.RLIM_INFINITY:
        return Finding("limits", name, "ok", "unlimited")
    if least is not None and most >= least:
        return Finding("limits", name, "ok", f"{text(most)} at most")
    return Finding("limits", name, "note", f"{text(most)} at most", advice)


def _packages() -> Iterator[Finding]:
    """Yield findings about SPPO, torch and optional packages."""
    subject = "packages"
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
    if "torch" not in sys.modules:
        check_room_for_libraries()
    import torch

    return torch


def _native_parts() -> Iterator[Finding]:
    """Yield findings about the memory pool, which is compiled now if it is missing."""
    subject = "native parts"
    native_build.forget_failure()
    if not _torch_works():
        yield Finding(subject, "memory pool", "missing", "it works with torch alone", "mend torch")
        return
    from sppo.kernels.native.cpu_allocator import describe_cpu_allocator, install_cpu_allocator

    pool = install_cpu_allocator() is not None
    found = describe_cpu_allocator()
    again = "once the reason is mended, sppo doctor builds it"
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
    names = preference(device)
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
            on_gpus = ", ".join(name for name in there if "cuda" in CAPABILITIES[name].devices)
            found, advice = f"{on_gpus} are installed", "which of them runs, a GPU decides"
            yield Finding("attention (cuda)", "on a GPU", "note", found, advice)
        yield _half_products(needs_casts(torch.empty(1, dtype=torch.bfloat16)))


def _half_products(casts: bool) -> Finding:
    """Return the finding about how a CPU multiplies numbers in bf16."""
    subject, name = "arithmetic", "bf16 on the CPU"
    if casts:
        found, advice = "multiplied in fp32, tile by tile", "train.dtype=fp32 is as fast here"
        return Finding(subject, name, "note", found, advice)
    return Finding(subject, name, "ok", "the processor multiplies them itself")


def _measured(hardware: Path | None) -> Iterator[Finding]:
    """Yield findings about the figures in a file of ``sppo bench``."""
    subject, bench = "measured", "sppo bench all -o hardware.json (two minutes)"
    if hardware is None:
        advice = f"plans for this machine use a preset until it is measured: {bench}"
        yield Finding(subject, "rates", "missing", "no file was named (--hardware FILE)", advice)
        return
    try:
        spec = read_hardware(hardware)
    except (OSError, ValueError) as error:
        found = f"{hardware}: {error.strerror}" if isinstance(error, OSError) else str(error)
        yield Finding(subject, "rates", "broken", found, f"name another file, or measure: {bench}")
        return
    yield Finding(subject, "rates", "ok", f"{spec.shown_name}: {spec.provenance}, in {hardware}")
    device, node, network = spec.device, spec.node, spec.network
    dtypes = sorted({point.dtype for point in device.gemm_points})
    rates = [f"{device.flops_per_s(dtype) / 1e12:.3g} TFLOP/s in {dtype}" for dtype in dtypes]
    figures = {"products": f"at most {', '.join(rates)}" if rates else "a preset's"}
    if network.message_compute_s_per_byte:
        figures["messages"] = (
            f"{_gigabytes(network.intra_node_bytes_per_s)} between ranks; a byte takes "
            f"{network.message_compute_s_per_byte * 1e9:.2f} ns of compute on each end"
        )
    if node.disk_bytes and node.disk_write_bytes_per_s:
        written, read = map(_gigabytes, (node.disk_write_bytes_per_s, node.disk_read_bytes_per_s))
        figures["disk"] = f"{written} written, {read} read"
    if node.host_memory_bytes and node.d2h_bytes_per_s:
        to_host, back = map(_gigabytes, (node.d2h_bytes_per_s, node.h2d_bytes_per_s))
        figures["host copies"] = f"{to_host} to the host, {back} back"
    for name, text in figures.items():
        yield Finding(subject, name, "ok", text)


def _gigabytes(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
