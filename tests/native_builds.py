"""Compilers for tests of the native libraries."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sppo.kernels.native.extension import NativeLibrary, native_library

ROOT = Path(__file__).parents[1]


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
    found = native_library()
    assert found is not None
    return found
