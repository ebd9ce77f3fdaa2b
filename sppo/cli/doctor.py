"""``sppo doctor``: report what this machine offers and how to add what is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import typer
from rich.markup import escape
from rich.text import Text

from sppo import native_build
from sppo.cli.arguments import Json
from sppo.cli.exit_codes import exit_codes
from sppo.cli.printing import Screen, columns, emit
from sppo.hardware import this_machine
from sppo.kernels.native.machine_memory import check_room_for_libraries
from sppo.parallel.job.exit_codes import FAULT
from sppo.parallel.job.open_files import files_of_a_rank
from sppo.quoting import quoted
from sppo.units import GIB, MIB, counted, format_bytes
from sppo.version import __version__

State = Literal["ok", "note", "missing", "broken"]
"""State of a finding. ok: present and used; note: something to know; missing: not present, so that
a feature is lost; broken: present and not working."""

_SIGNS = {"ok": "ok", "note": "note", "missing": "-", "broken": "BROKEN"}
_MANY_RANKS = 64
_HEAD_SIZE, _GROUP = 128, 4
"""Head size, and query heads per key/value head, of the attention case that back ends are checked
on."""
_OPTIONAL = (
    ("triton", "triton", "GPU kernels of SPPO; without it a GPU runs slower ones of torch"),
    ("flash-attn", "flash-attn", "attention on a GPU before Hopper; torch has its own copy"),
    ("pynvml", "nvidia-ml-py", "finds out which GPU this is; without it the plan assumes one"),
    ("tokenizers", "tokenizers", "reads tokenizer.json"),
    ("tensorboard", "tensorboard", "writes what track.to=tensorboard asks for"),
    ("wandb", "wandb", "sends a run's records where track.to=wandb says"),
    ("trackio", "trackio", "sends a run's records where track.to=trackio says"),
    ("mlflow", "mlflow-skinny", "sends a run's records where track.to=mlflow says"),
)
"""Name, distribution and use of optional packages."""
_ANYTHING = (Exception, SystemExit)
"""Errors that the import of a broken package may raise."""


class Finding(NamedTuple):
    """Result of one check."""

    name: str
    """Name of the check."""
    state: State
    """State of what was checked."""
    found: str
    """Text about what was found."""
    advice: str = ""
    """What to do about it; "" if nothing needs to be done."""
    subject: str = ""
    """Group of the check, e.g. "GPU"."""


def doctor(json_output: Json = False) -> None:
    """Report what training and planning find on this machine, and how to add what is missing.

    Nothing is measured or downloaded; SPPO's memory pool is built if it is missing. Exit code 1:
    something that is installed does not work.
    """
    with exit_codes():
        findings = examine()
    values = {"findings": [finding._asdict() for finding in findings]}
    emit(lambda: values, lambda: _screen(findings), as_json=json_output)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(FAULT)


def _screen(findings: Sequence[Finding]) -> Screen:
    """Yield a table for each subject, with the advice below each finding."""
    for subject, group in groupby(findings, key=lambda finding: finding.subject):
        yield Text(subject, style="bold")
        yield columns(
            [_SIGNS[one.state], one.name, escape(f"{one.found}\n{one.advice}".rstrip())]
            for one in group
        )


def examine() -> tuple[Finding, ...]:
    """Return the findings on this machine; nothing is measured or downloaded.

    The memory pool is built if it is missing. A check that fails, in whatever way, is a finding and
    hides no other; what needs torch is left out if torch cannot be loaded.
    """
    checks: Mapping[str, Callable[[], Iterator[Finding]]] = {
        "machine": _machine,
        "limits": _limits,
        "packages": _packages,
        "native parts": _native_parts,
        "GPU": _gpus,
        "attention": _attention,
    }
    findings: list[Finding] = []
    for subject, check in checks.items():
        try:
            findings += (finding._replace(subject=subject) for finding in check())
        except _ANYTHING as error:
            package = (getattr(error, "name", None) or "").split(".")[0]
            broken = _broken(package or f"look at {subject}", error, package=package)
            findings.append(broken._replace(subject=subject))
        if any(finding.name == "torch" and finding.state == "broken" for finding in findings):
            break
    return tuple(findings)


def _broken(name: str, error: BaseException, *, package: str) -> Finding:
    """Return the finding that something cannot be used because of an error."""
    again = f"it again: pip install --force-reinstall {package}"
    advice = f"install {again if package else 'the package that fails again'}"
    return Finding(name, "broken", f"cannot be used: {type(error).__name__}: {error}", advice)


def _enough(name: str, is_enough: bool, found: str, advice: str) -> Finding:
    """Return a finding, with advice if there is too little of what was found."""
    return Finding(name, "ok", found) if is_enough else Finding(name, "note", found, advice)


def _machine() -> Iterator[Finding]:
    """Yield findings about processor, memory, rates, system and threads."""
    cores, all_cores = this_machine.count_cores(), os.cpu_count() or 1
    limit = this_machine.control_group_limit_bytes()
    counts = counted(cores, "core") if cores == all_cores else f"{cores} of {all_cores} cores"
    memory = format_bytes(this_machine.usable_memory_bytes())
    if limit is not None:
        memory += f" (limit of the control group: {format_bytes(limit)})"
    yield Finding("processor", "ok", f"{this_machine.cpu_model()}, {counts}")
    yield Finding("memory", "ok", memory)
    measure = "sppo bench all -o hardware.json (two minutes)"
    found = "plans for this machine use those of a preset, until it is measured"
    yield Finding("rates", "note", found, f"measure it: {measure}")
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    yield Finding("system", "ok", system)
    yield _threads(cores)


def _threads(cores: int) -> Finding:
    """Return the finding about OMP_NUM_THREADS, the number of threads that torch may use."""
    given = os.environ.get("OMP_NUM_THREADS")
    if given is None:
        return Finding("threads", "ok", f"OMP_NUM_THREADS is not set: torch takes {cores}")
    outer = given.split(",")[0].strip()  # the other numbers are for nested parallelism
    if not outer.isdecimal() or not 1 <= int(outer) <= cores:
        found = f"OMP_NUM_THREADS={quoted(given)}, and there are {cores} cores"
        return Finding("threads", "note", found, f"unset it, or write a number from 1 to {cores}")
    advice = f"unset it to train one rank on all {cores} cores"
    return _enough("threads", int(outer) == cores, f"OMP_NUM_THREADS={given}", advice)


def _limits() -> Iterator[Finding]:
    """Yield findings about limits that a run with many ranks, or on a GPU, may reach."""
    files = files_of_a_rank(_MANY_RANKS)
    opens = f"a rank of {_MANY_RANKS} opens about {files}: raise it (ulimit -Hn)"
    yield _limit("open files", resource.RLIMIT_NOFILE, files, str, opens)
    locks = (
        "enough for page-locked host memory, which the driver locks; InfiniBand needs more: "
        "ulimit -l unlimited"
    )
    yield _limit("locked memory", resource.RLIMIT_MEMLOCK, GIB, format_bytes, locks)
    yield _shared_memory(Path("/dev/shm"))


def _limit(name: str, kind: int, least: int, text: Callable[[int], str], advice: str) -> Finding:
    """Return the finding about a limit of the system, with advice if it is below `least`."""
    _, most = resource.getrlimit(kind)
    if most == resource.RLIM_INFINITY:
        return Finding(name, "ok", "unlimited")
    return _enough(name, most >= least, f"{text(most)} at most", advice)


def _shared_memory(directory: Path) -> Finding:
    """Return the finding about the free space of shared memory."""
    name, needs = "shared memory", "NCCL between GPUs of a machine needs"
    try:
        room = os.statvfs(directory)
    except OSError as error:
        advice = f"{needs} it: mount it"
        return Finding(name, "note", f"{directory} cannot be read: {error.strerror}", advice)
    free = room.f_bavail * room.f_frsize
    advice = f"{needs} more: in a container start it with --shm-size=1g"
    return _enough(name, free >= 64 * MIB, f"{format_bytes(free)} free in {directory}", advice)


def _packages() -> Iterator[Finding]:
    """Yield findings about SPPO, torch and optional packages."""
    yield Finding("sppo", "ok", __version__)
    try:
        torch = _torch()
    except MemoryError as error:
        yield Finding("torch", "broken", "there is no room to load it", str(error))
        return
    except _ANYTHING as error:
        yield _broken("torch", error, package="torch")
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Finding("torch", "ok", f"{torch.__version__} ({built})")
    for name, distribution, use in _OPTIONAL:
        module = name.replace("-", "_")
        try:
            importlib.import_module(module)
            yield Finding(name, "ok", importlib.metadata.version(distribution))
        except _ANYTHING as error:
            if isinstance(error, ModuleNotFoundError) and error.name in (module, distribution):
                advice = f"{use}: pip install {distribution}"
                yield Finding(name, "missing", "not installed", advice)
            else:
                yield _broken(name, error, package=distribution)


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
    native_build.forget_failure()
    from sppo.kernels.native.cpu_allocator import describe_cpu_allocator, install_cpu_allocator

    if install_cpu_allocator() is not None:
        yield Finding("memory pool", "ok", describe_cpu_allocator())
    else:
        again = "once the reason is mended, sppo doctor builds it"
        advice = f"memory of CPU runs is less exact: {again}"
        yield Finding("memory pool", "missing", describe_cpu_allocator(), advice)


def _gpus() -> Iterator[Finding]:
    """Yield findings about the GPUs that torch sees, NCCL, and what a run on a GPU lacks."""
    torch = _torch()
    if torch.version.cuda is None or not torch.cuda.is_available():
        found = "torch sees no GPU"
        advice = "nvidia-smi says whether the driver sees one; CUDA_VISIBLE_DEVICES may hide it"
        if torch.version.cuda is None:
            found = "this torch was built without it"
            advice = "to train on a GPU, install a torch with CUDA on a machine with one"
        yield Finding("CUDA", "missing", found, advice)
        found = "training runs on the CPU; plans for GPUs need none (hardware.preset)"
        yield Finding("training", "note", found)
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        size, capability = format_bytes(gpu.total_memory), f"{gpu.major}.{gpu.minor}"
        found = f"{gpu.name}, {size}, compute capability {capability}"
        yield Finding(f"cuda:{index}", "ok", found)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield Finding("NCCL", "ok", "there")
    else:
        yield Finding("NCCL", "missing", "none", "runs on several GPUs need a torch with NCCL")


def _attention() -> Iterator[Finding]:
    """Yield findings about attention back ends, in order of preference on the device of a run."""
    torch = _torch()
    from sppo.kernels.attention.choice import (
        CAPABILITIES,
        AttentionCase,
        chosen_name,
        preference,
        why_not,
    )
    from sppo.kernels.half_products import needs_casts

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = AttentionCase(device, torch.bfloat16, _HEAD_SIZE, _GROUP, window=False)
    chosen = chosen_name(case)
    for name in preference(device):
        if device.type not in CAPABILITIES[name].devices:
            continue
        reason = why_not(name, case)
        found = f"taken by auto for bf16 on {device.type}" if name == chosen else reason or "there"
        yield Finding(name, "ok" if reason is None else "missing", found)
    if device.type == "cpu":
        found, advice = "multiplied in fp32, tile by tile", "train.dtype=fp32 is as fast here"
        if not needs_casts(torch.empty(1, dtype=torch.bfloat16)):
            found, advice = "the processor multiplies them itself", ""
        yield _enough("bf16 on the CPU", not advice, found, advice)
