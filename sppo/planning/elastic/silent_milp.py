"""Mixed-integer programs solved by HiGHS with its output suppressed.

HiGHS prints a debugging line (``HighsMipSolverData::…``) even if output is turned off. The line
would corrupt JSON on standard output and the log of a run.
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
    """Call :func:`scipy.optimize.milp` without output."""
    with without_output():
        return optimize.milp(*given, **named)


@contextmanager
def without_output() -> Iterator[None]:
    """Discard everything written to standard output in the context, also by native code."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    c_library = ctypes.CDLL(None)
    c_library.fflush(None)
    try:
        kept = os.dup(_STANDARD_OUTPUT)
    except OSError:  # standard output is closed
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STANDARD_OUTPUT)
        os.close(nowhere)
        yield
    finally:
        c_library.fflush(None)  # flush before standard output is restored
        os.dup2(kept, _STANDARD_OUTPUT)
        os.close(kept)
