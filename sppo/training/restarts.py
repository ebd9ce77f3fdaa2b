"""Ranks of a run, started by this process, and started again after a fault."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from sppo.hardware.this_machine import find_gpus
from sppo.parallel.job.exit_codes import CORRUPTED
from sppo.parallel.job.job_end import JobEnd
from sppo.parallel.job.restarts import Decision, Fault, decide
from sppo.parallel.job.signals import STOP_CODES
from sppo.report.lines import print_titled
from sppo.training.run_directory import FAILURES_FILE
from sppo.training.start import ReadyRun, on_devices, start_ranks

_log = logging.getLogger(__name__)


def train_on_ranks(ready: ReadyRun, words: Sequence[str], *, console: Console) -> int:
    """Train with one process per rank; after a fault start them again, as the run allows.

    Args:
        ready: Run to train.
        words: Arguments of the ``sppo`` command of every rank.
        console: Console on which restarts are announced.

    Returns:
        Exit code of the last ranks.

    Raises:
        ValueError: This machine has fewer devices than ranks.
        MemoryError: The limit of open files is too low.
    """
    restarts, shrink = ready.restarts, ready.run.train.shrink
    output, gpus = Path(ready.run.train.output), find_gpus()
    faults, left_out = list[Fault](), set[int]()
    while True:
        end = start_ranks(ready, words)
        if end.exit_code == 0:
            return 0
        faults.append(_fault(end, ready, attempt=len(faults) + 1))
        decision = decide(faults, restarts=restarts, shrink=shrink)
        if end.is_failure:
            _keep(faults[-1], decision, output)
        if decision.action == "end":
            if restarts:
                _announce(f"none: {decision.reason}", console)
            return end.exit_code
        _announce(f"{len(faults)} of {restarts}: {decision.reason}", console)
        if gpus is not None and find_gpus() is None:
            raise ValueError("the GPUs of this machine do not answer any more")
        if decision.action == "leave out":
            left_out.update(faults[-1].devices)
        if shrink:
            ready = on_devices(ready, console, left_out=left_out)


def _announce(decision: str, console: Console) -> None:
    """Print a decision on the console, or on a quiet one as a warning: the report was printed."""
    if console.quiet:
        _log.warning("restart %s", decision)
    else:
        print_titled("restart", decision, console)


def _fault(end: JobEnd, ready: ReadyRun, *, attempt: int) -> Fault:
    """Return the fault that ended a job."""
    blamed = end.blamed
    corrupt = [rank_end.rank for rank_end in end.ends if rank_end.returncode == CORRUPTED]
    return Fault(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        attempt=attempt,
        num_ranks=len(end.ends),
        rank=blamed.rank,
        devices=tuple(ready.devices[rank] for rank in corrupt or [blamed.rank]),
        step=blamed.note.step if blamed.note is not None and blamed.note.action else None,
        exit_code=end.exit_code,
        asked=end.asked[0] if end.asked else STOP_CODES.get(end.exit_code),
        cause=end.report.partition("\n")[0].removeprefix("error: "),
        report=end.report,
        seconds=end.seconds(),
    )


def _keep(fault: Fault, decision: Decision, output: Path) -> None:
    """Append a fault to the file of a run's failures, if the run has made its directory."""
    if not output.is_dir():
        return
    try:
        with (output / FAILURES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(fault), **asdict(decision)}) + "\n")
    except OSError as error:
        _log.warning("%s: a failure is not recorded: %s", error.filename, error.strerror)
