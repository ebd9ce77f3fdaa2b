"""Mixed-integer programs solved by HiGHS, without what it prints.

It prints a line of its own debugging (``HighsMipSolverData::…``) whatever it is told about
output. Between the lines of a run, or in JSON that a program reads, it has no place.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from scipy import optimize

_STANDARD_OUTPUT = 1


def milp(*given: Any, **named: Any) -> optimize.OptimizeResult:
    """Return what :func:`scipy.optimize.milp` returns."""
    with without_output():
        return optimize.milp(*given, **named)


@contextmanager
def without_output() -> Iterator[None]:
    """Drop what is printed on standard output within, also by code that is not Python."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    c_library = ctypes.CDLL(None)
    c_library.fflush(None)
    try:
        kept = os.dup(_STANDARD_OUTPUT)
    except OSError:  # it is closed
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STANDARD_OUTPUT)
        os.close(nowhere)
        yield
    finally:
        c_library.fflush(None)  # before it would go where it was kept from
        os.dup2(kept, _STANDARD_OUTPUT)
        os.close(kept)
