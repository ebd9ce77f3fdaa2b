"""Build of the memory pool from ``csrc``: by the installation, or when it is first needed.

The pool is C++ and is compiled against torch's headers, which torch brings along. ``pip install``
compiles it, but an isolated build often comes before torch, and another torch may come later. So
the name of the library's file holds a digest of all that it is made from, and a process that finds
no file of this name compiles it: in the package, or in the user's cache where the package cannot be
written. Of processes that start together one compiles, the others wait. Nothing here ends a
program: without the library torch's own allocator serves, and the program says why. Imports the
standard library alone, because an isolated build has nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PLACE = Path(__file__).parent / "kernels/_native"
"""Where the package has its library, and its copy of the sources unless it is a clone."""
POOL_SWITCH = "SPPO_CPU_ALLOCATOR"
"""Environment variable; the value ``heap`` leaves torch's allocator unchanged."""
_SOURCES = ("cpu_allocator.cpp", "memory_pool.cpp")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 120
_FAILURE = ".failed.txt"


class NotBuiltError(Exception):
    """No library; the message says why, and what to do, in one line."""


def build_native(destination: Path) -> None:
    """Compile the pool into ``destination`` and say on stdout what happened, as pip does."""
    try:
        target = destination / file_name()
        destination.mkdir(parents=True, exist_ok=True)
        _compile(target)
    except (NotBuiltError, OSError) as error:
        print(f"sppo: no memory pool yet, built when first needed: {error}")
    else:
        print(f"sppo: memory pool built: {target.name}")


def find() -> Path | None:
    """Return the file of the pool if it is built already."""
    try:
        name = file_name()
    except (NotBuiltError, OSError):
        return None
    return next((place / name for place in _places() if (place / name).is_file()), None)


def built() -> Path | str:
    """Return the file of the pool, compiled now if there is none yet, or why there is none."""
    try:
        return find() or _build_once()
    except (NotBuiltError, OSError) as error:
        return f"not built: {error}"


def memory_pool() -> Path | str:
    """Return the file of the memory pool that this process is to use, or why it uses none."""
    if os.environ.get(POOL_SWITCH, "").lower() == "heap":
        return f"{POOL_SWITCH}=heap"
    return built()


def forget_failure() -> None:
    """Let :func:`built` call a compiler again that failed earlier."""
    for place in _places():
        for file in place.glob(f"*{_FAILURE}"):
            with suppress(OSError):
                file.unlink()


def file_name() -> str:
    """Return the name of the pool's file, which changes with whatever it is made from.

    Raises:
        NotBuiltError: There is no torch.
        OSError: The sources cannot be read.
    """
    digest = hashlib.sha256()
    for source in sorted(_sources().glob("*.[ch]*")):
        digest.update(source.read_bytes())
    # A home directory may be shared by machines that differ.
    made_for = [*_FLAGS, platform.machine(), *platform.libc_ver()]
    made_for.append(_torch_version(_torch_directory()))
    digest.update(" ".join(made_for).encode())
    return f"sppo_cpu_allocator-{digest.hexdigest()[:12]}.so"


def _sources() -> Path:
    installed = PLACE / "csrc"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "csrc"


def _places() -> tuple[Path, ...]:
    """Return the directories of the library, the best one first."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return (PLACE, cache / "sppo") if cache.is_absolute() else (PLACE,)


def _build_once() -> Path:
    """Compile the pool that is missing, unless another process does, or it failed before.

    Raises:
        NotBuiltError: It cannot be compiled.
    """
    _compiler()  # without one there is nothing to wait for
    place = _writable_place()
    target = place / file_name()
    failure = target.with_suffix(_FAILURE)
    with _alone(place / "lock"):
        if target.is_file():
            return target
        if failure.is_file() and (reason := failure.read_text().strip()):
            raise NotBuiltError(reason)
        print("sppo: building the memory pool, once", file=sys.stderr, flush=True)
        try:
            _compile(target)
        except NotBuiltError as error:
            with suppress(OSError):  # the disk may be full, which may be why it failed
                failure.write_text(f"{error} (sppo doctor tries again)\n")
            raise
    return target


def _writable_place() -> Path:
    for place in _places():
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            if os.access(place, os.W_OK):
                return place
    raise NotBuiltError(f"none of {', '.join(map(str, _places()))} can be written")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Keep other processes waiting; on a file system without locks each of them compiles."""
    with lock.open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(target: Path) -> None:
    """Compile the pool and move it to ``target`` at once, so that nobody loads half of it.

    Raises:
        NotBuiltError: There is no compiler, or it fails.
        OSError: The directory of ``target`` cannot be written.
    """
    torch = _torch_directory()
    sources = [str(_sources() / name) for name in _SOURCES]
    command = [*_compiler(), *_FLAGS, *sources]
    command += [f"-isystem{torch / 'include'}", f"-L{torch / 'lib'}", "-lc10"]
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / target.name
        _run([*command, "-o", str(made)])
        made.replace(target)


def _compiler() -> list[str]:
    """Return the compiler that CXX names, flags included, else the first there is.

    Raises:
        NotBuiltError: There is none, or the variable is no command.
    """
    given = os.environ.get("CXX", "")
    try:
        named = shlex.split(given)
    except ValueError as error:
        raise NotBuiltError(f"CXX={given} is no command ({error}); mend or unset it") from None
    for command in (named, *([name] for name in _COMPILERS)):
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    names = ", ".join([*named[:1], *_COMPILERS])
    raise NotBuiltError(f"no C++ compiler ({names}); install one, e.g. apt install g++")


def _torch_directory() -> Path:
    """Return where torch is installed; an isolated build cannot import it, but can see it.

    Raises:
        NotBuiltError: It is not there, or has no headers.
    """
    places = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for place in places:
        torch = Path(place) / "torch"
        if (torch / "version.py").exists() and (torch / "include/c10").is_dir():
            return torch
    raise NotBuiltError("no torch with its headers in this environment; pip install torch")


def _torch_version(torch: Path) -> str:
    version = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
    if version is None:
        raise NotBuiltError(f"{torch / 'version.py'} names no version")
    return version[1]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise NotBuiltError(f"{command[0]} took over {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise NotBuiltError(f"{command[0]} failed: {_first_error(done.stderr or done.stdout)}")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
