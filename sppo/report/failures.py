"""Failures of a run, and the file that keeps them, ``failures.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FAILURES_FILE = "failures.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """One failure of the ranks that ``sppo train`` started, and what followed."""

    time: str
    """When all ranks had ended, in UTC (ISO 8601)."""
    attempt: int
    """Number of the start of the ranks by this command, counted from 1."""
    num_ranks: int
    """Number of ranks of this start."""
    rank: int
    """Rank to blame."""
    device: int
    """Its device, by its number among the devices that the command sees; on a CPU, its rank while
    no rank was left out."""
    step: int | None
    """Step of that rank, counted from 1; None before its first step after the start."""
    exit_code: int
    """Exit code of the ranks, which is that of the command if the run ends here."""
    cause: str
    """First line of the report."""
    report: str
    """Whole report: the rank to blame, its place in the program, and what the other ranks did."""
    action: Literal["restart", "leave out", "end"]
    """restart: the same run starts again; leave out: without the device to blame; end: not."""
    reason: str
    """Reason of this action."""
    seconds: Mapping[str, float]
    """Seconds by part. Of this start, as far as rank 0 came: started (processes, libraries and
    connections), planned (checks and plan), loaded (state and checkpoint), first step. Of the
    failure: noticed (until the command knew of it) and ended (until the last rank had ended)."""


def append_failure(output: Path, record: FailureRecord) -> None:
    """Append a failure to the file in the directory of a run.

    Raises:
        OSError: The file cannot be written.
    """
    with (output / FAILURES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")
