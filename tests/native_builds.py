"""Native library built for tests, independent of the installation."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from sppo.kernels.native.extension import NativeLibrary

ROOT = Path(__file__).parents[1]


def build_module() -> ModuleType:
    """csrc/build_native.py, which stands outside the package."""
    path = ROOT / "csrc/build_native.py"
    spec = importlib.util.spec_from_file_location("build_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def c_compiler() -> str:
    """A C compiler; without one the test is skipped."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no C compiler (cc, gcc, clang)")
    return found


def cxx_compiler() -> str:
    """A C++ compiler; without one the test is skipped."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no C++ compiler (c++, g++, clang++)")
    return found


def library() -> NativeLibrary:
    """The library of the present sources; without a compiler the test is skipped."""
    c_compiler()
    return _library()


@functools.cache
def _library() -> NativeLibrary:
    build = build_module()
    with tempfile.TemporaryDirectory() as directory:
        # Loaded libraries outlive their files.
        built = build._with_compiler(build._native(), Path(directory))
        return NativeLibrary(built)
