"""Builds the native library during installation: with CMake, else with a C compiler alone.

A fresh machine often has a compiler and no CMake, so one is no condition for the other. Nothing
here raises: without a library the program serves itself in Python and says why at its start.
Imports nothing but the standard library, because an isolated build has nothing else.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("host_arena.c",)
LIBRARY_NAME = "sppo_native.so"
REASON_NAME = "not_built.txt"
"""Both names are known to sppo/kernels/extension.py, which reads what is left here."""

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")
_TIMEOUT_S = 120


class NotBuiltError(Exception):
    """One way of building did not work; the message says why in one line."""


def build_native(destination: Path) -> bool:
    """Leave in ``destination`` the library, or a text that says why there is none.

    Whatever an earlier build left there goes first. Says on stdout what happened, and returns
    whether there is a library.
    """
    reasons = []
    try:
        destination.mkdir(parents=True, exist_ok=True)
        for name in (LIBRARY_NAME, REASON_NAME):
            (destination / name).unlink(missing_ok=True)
        for how, build in (("CMake", _with_cmake), ("a compiler", _with_compiler)):
            try:
                with tempfile.TemporaryDirectory() as work:
                    _put(build(Path(work)), destination / LIBRARY_NAME)
            except (NotBuiltError, OSError) as error:
                reasons.append(str(error))
            else:
                print(f"sppo: native library built with {how}")
                return True
        (destination / REASON_NAME).write_text("; ".join(reasons) + "\n")
    except OSError as error:
        reasons.append(str(error))
    print(f"sppo: no native library, Python serves instead: {'; '.join(reasons)}")
    return False


def _with_cmake(work: Path) -> Path:
    cmake = shutil.which("cmake")
    if cmake is None:
        raise NotBuiltError("no cmake")
    _run([cmake, "-S", str(ROOT), "-B", str(work), f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={work}"])
    _run([cmake, "--build", str(work), "--target", "sppo_native", "--config", "Release"])
    return work / LIBRARY_NAME


def _with_compiler(work: Path) -> Path:
    library = work / LIBRARY_NAME
    sources = [str(ROOT / "csrc" / name) for name in SOURCES]
    _run([*_compiler(), *_FLAGS, "-o", str(library), *sources])
    return library


def _compiler() -> list[str]:
    """The compiler that CC names, flags included, as everywhere; else the first there is."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in (named, *([name] for name in _COMPILERS)):
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise NotBuiltError(f"no C compiler ({', '.join([*named[:1], *_COMPILERS])})")


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
