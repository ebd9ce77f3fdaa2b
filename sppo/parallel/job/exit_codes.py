"""Exit codes of commands and of ranks; those of signals are in :mod:`sppo.parallel.job.signals`."""

from __future__ import annotations

FAULT = 1
"""A failing disk, a lost rank, a bug; also the exit code of a job whose rank a signal killed."""
BAD_INPUT = 2
NO_PLAN = 3
NO_ROOM = 4
CORRUPTED = 5
