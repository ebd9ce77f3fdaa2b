"""One fuzz case: its documented outcomes, and the report of any other outcome."""

from __future__ import annotations

import json
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

CPU_SECONDS = 10.0
"""A case that computes longer counts as a hang; waiting for a busy machine does not count."""

_GROWTH_BYTES = 600 << 20
_LINE_CHARACTERS = 2500
_LINES = 40

Case = Callable[[random.Random, Path], None]
"""Runs one case in a scratch directory of its target."""


class CaseHangError(Exception):
    """A case that used more processor time than any may."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that ended in a way that is not documented."""

    target: str
    seed: int
    what: str


def run_case(target: str, case: Case, *, seed: int, directory: Path) -> Finding | None:
    """Run the case of `seed`; None if it succeeds or refuses its input in a documented way.

    Documented is a ValueError of the project's own words, an OSError that names its file, and a
    MemoryError with a message; a few lines without control characters.
    """
    before = _peak_bytes()
    try:
        with _limited():
            case(random.Random(f"{target}:{seed}"), directory)
    except Exception as error:
        problem = _undocumented(error)
        if problem is not None:
            trace = "".join(traceback.format_exception(error)[-6:])
            return Finding(target, seed, f"{problem}\n{trace[-3000:]}")
    grown = _peak_bytes() - before
    if grown > _GROWTH_BYTES:
        return Finding(target, seed, f"took {grown >> 20} MiB")
    return None


def _undocumented(error: Exception) -> str | None:
    kind = type(error).__name__
    foreign = (UnicodeError, json.JSONDecodeError, ValidationError)
    if isinstance(error, foreign) or not isinstance(error, (ValueError, OSError, MemoryError)):
        return f"{kind} is no documented error"
    message = str(error)
    lines = message.split("\n")
    if not message.strip():
        return f"{kind} without a message"
    if len(lines) > _LINES or max(map(len, lines)) > _LINE_CHARACTERS:
        return f"{kind} with a message of {len(message)} characters"
    if not all(line.isprintable() for line in lines):
        return f"{kind} with control characters: {message[:300]!r}"
    return None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _limited() -> Iterator[None]:
    def hang(*_: Any) -> None:
        raise CaseHangError(f"more than {CPU_SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
