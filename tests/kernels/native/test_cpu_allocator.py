"""Memory pool of torch's CPU tensors, tested in subprocesses because it cannot be uninstalled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sppo import native_build
from sppo.kernels.native import cpu_allocator

ROOT = Path(__file__).parents[3]

CHECKS = ("address,undefined", "thread")


@pytest.fixture(scope="module")
def library():
    """The pool of the present sources; without a compiler the test is skipped."""
    cxx_compiler()
    built = native_build.built()
    assert isinstance(built, Path), built
    return built


def cxx_compiler():
    """A C++ compiler; without one the test is skipped."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no C++ compiler (c++, g++, clang++)")
    return found


def run(library, code, **environment):
    prologue = (
        "import torch\nfrom sppo.kernels.native import cpu_allocator\n"
        "MIB = 1 << 20\n"
        "allocator = cpu_allocator.install_cpu_allocator()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prologue + code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", CHECKS)
def test_pool_is_clean_under_sanitizers(tmp_path, sanitizer):
    program = tmp_path / "check"
    sources = [ROOT / "tests/kernels/memory_pool_check.cpp", ROOT / "csrc/memory_pool.cpp"]
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    sanitize = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    include = ["-I", ROOT / "csrc"]
    command = [cxx_compiler(), *flags, *sanitize, *include, "-o", program, *sources]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"no runtime for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    checked = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (checked.returncode, checked.stdout) == (0, "ok\n"), checked.stderr


def test_tensors_live_in_the_pool_and_leave_it(library):
    """And what is refused is an error."""
    run(
        library,
        """
before = allocator.memory().used_bytes
x = torch.ones(5 * MIB, dtype=torch.uint8)
assert allocator.memory().used_bytes == before + 5 * MIB
y = x[MIB:].clone()
assert allocator.memory().used_bytes == before + 9 * MIB
del x, y
now = allocator.memory()
assert (now.used_bytes, now.used_peak_bytes) == (before, before + 9 * MIB)
assert now.resident_bytes >= 9 * MIB
allocator.trim()
assert allocator.memory().resident_bytes < 2 * MIB
allocator.reset_peak()
assert allocator.memory().used_peak_bytes == before
small = torch.ones(1000)
assert allocator.memory().used_bytes == before
try:
    torch.empty(1 << 60, dtype=torch.uint8)
except RuntimeError as error:
    assert "not enough memory" in str(error)
else:
    raise AssertionError
assert allocator.memory().used_bytes == before
""",
    )


def test_reasons_why_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_allocator, "memory_pool", lambda: "not built: no g++")
    assert cpu_allocator._install.__wrapped__() == "not built: no g++"
    (tmp_path / "library.so").write_text("no library")
    monkeypatch.setattr(cpu_allocator, "memory_pool", lambda: tmp_path / "library.so")
    assert "does not load" in cpu_allocator._install.__wrapped__()
