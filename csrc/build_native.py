"""Builds the native libraries during installation: with CMake, else with a compiler alone.

Two of them: ``sppo_native.so`` needs C and nothing else; ``sppo_cpu_allocator.so`` needs C++ and
torch's headers, which torch brings along. A fresh machine often has a compiler and no CMake, so one
is no condition for the other. Nothing here raises: without a library the program serves itself in
Python and says why at its start. Imports nothing but the standard library, because an isolated
build has nothing else.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ("host_arena.c", "file_tier.c")
LIBRARY_NAME = "sppo_native.so"
REASON_NAME = "not_built.txt"
"""Both names are known to sppo/kernels/native/extension.py, which reads what is left here."""
ALLOCATOR_SOURCES = ("cpu_allocator.cpp", "memory_pool.cpp")
ALLOCATOR_NAME = "sppo_cpu_allocator.so"
ALLOCATOR_REASON_NAME = "cpu_allocator_not_built.txt"
"""Known to sppo/kernels/native/cpu_allocator.py."""

_FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")
_TIMEOUT_S = 120


class NotBuiltError(Exception):
    """One way of building did not work; the message says why in one line."""


class _Library(NamedTuple):
    """What it takes to build one of them."""

    name: str
    reason_name: str
    sources: tuple[str, ...]
    standard: str
    compiler_variable: str
    compilers: tuple[str, ...]
    flags: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    """Of CMake."""

    @property
    def target(self) -> str:
        """Its name in CMakeLists.txt."""
        return self.name.removesuffix(".so")


def build_native(destination: Path) -> bool:
    """Leave in ``destination`` the libraries, or for each a text that says why there is none.

    Whatever an earlier build left there goes first. Says on stdout what happened, and returns
    whether the first, ``sppo_native.so``, is there.
    """
    built = _build(_native(), destination)
    try:
        allocator = _allocator()
    except NotBuiltError as error:
        _give_up(ALLOCATOR_NAME, destination / ALLOCATOR_REASON_NAME, reasons=[str(error)])
    else:
        _build(allocator, destination)
    return built


def _build(library: _Library, destination: Path) -> bool:
    reasons = []
    try:
        destination.mkdir(parents=True, exist_ok=True)
        for name in (library.name, library.reason_name):
            (destination / name).unlink(missing_ok=True)
        for how, build in (("CMake", _with_cmake), ("a compiler", _with_compiler)):
            try:
                with tempfile.TemporaryDirectory() as work:
                    _put(build(library, Path(work)), destination / library.name)
            except (NotBuiltError, OSError) as error:
                reasons.append(str(error))
            else:
                print(f"sppo: {library.name} built with {how}")
                return True
    except OSError as error:
        reasons.append(str(error))
    _give_up(library.name, destination / library.reason_name, reasons=reasons)
    return False


def _give_up(name: str, reason_file: Path, *, reasons: list[str]) -> None:
    try:
        reason_file.parent.mkdir(parents=True, exist_ok=True)
        (reason_file.parent / name).unlink(missing_ok=True)
        reason_file.write_text("; ".join(reasons) + "\n")
    except OSError as error:
        reasons.append(str(error))
    print(f"sppo: no {name}, the program does without: {'; '.join(reasons)}")


def _native() -> _Library:
    return _Library(
        name=LIBRARY_NAME,
        reason_name=REASON_NAME,
        sources=SOURCES,
        standard="-std=c11",
        compiler_variable="CC",
        compilers=("cc", "gcc", "clang"),
    )


def _allocator() -> _Library:
    """The one part that is compiled against torch.

    Raises:
        NotBuiltError: torch is not there.
    """
    torch = _torch_directory()
    version = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
    if version is None:
        raise NotBuiltError(f"{torch / 'version.py'} names no version")
    return _Library(
        name=ALLOCATOR_NAME,
        reason_name=ALLOCATOR_REASON_NAME,
        sources=ALLOCATOR_SOURCES,
        standard="-std=c++20",
        compiler_variable="CXX",
        compilers=("c++", "g++", "clang++"),
        flags=(
            f'-DSPPO_TORCH_VERSION="{version[1]}"',
            f"-isystem{torch / 'include'}",
            f"-L{torch / 'lib'}",
            "-lc10",
        ),
        definitions=(f"-DSPPO_TORCH={torch}", f"-DSPPO_TORCH_VERSION={version[1]}"),
    )


def _torch_directory() -> Path:
    """Where torch is installed; an isolated build cannot import it, but can see it."""
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
    for place in places:
        torch = Path(place) / "torch"
        if (torch / "version.py").exists() and (torch / "include/c10").is_dir():
            return torch
    raise NotBuiltError("no torch in this environment; install it first, then SPPO again")


def _with_cmake(library: _Library, work: Path) -> Path:
    cmake = shutil.which("cmake")
    if cmake is None:
        raise NotBuiltError("no cmake")
    place = f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={work}"
    _run([cmake, "-S", str(ROOT), "-B", str(work), place, *library.definitions])
    _run([cmake, "--build", str(work), "--target", library.target, "--config", "Release"])
    return work / library.name


def _with_compiler(library: _Library, work: Path) -> Path:
    built = work / library.name
    sources = [str(ROOT / "csrc" / name) for name in library.sources]
    command = [*_compiler(library), library.standard, *_FLAGS, "-o", str(built), *sources]
    _run([*command, *library.flags])
    return built


def _compiler(library: _Library) -> list[str]:
    """The compiler that CC or CXX names, flags included, as everywhere; else the first there is."""
    named = shlex.split(os.environ.get(library.compiler_variable, ""))
    for command in (named, *([name] for name in library.compilers)):
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise NotBuiltError(f"no compiler ({', '.join([*named[:1], *library.compilers])})")


def _put(library: Path, target: Path) -> None:
    """Into place in one move: a program that has the old one loaded keeps it whole."""
    staged = target.with_suffix(".new")
    shutil.copyfile(library, staged)
    staged.replace(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NotBuiltError(f"{command[0]} took over {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        print(done.stdout + done.stderr)
        raise NotBuiltError(f"{command[0]} failed: {_first_error(done.stderr or done.stdout)}")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
