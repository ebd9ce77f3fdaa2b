"""Ranks of a run, started by this process, and started again after a fault."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from sppo.parallel.job.job_end import JobEnd
from sppo.parallel.job.restarts import Decision, Fault, decide
from sppo.report.failures import FailureRecord, append_failure
from sppo.report.lines import print_titled
from sppo.training.start import ReadyRun, start_ranks

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
        ValueError: This machine has fewer GPUs than ranks.
        MemoryError: The limit of open files is too low.
    """
    config, restarts, faults = ready.run.train, ready.restarts, list[Fault]()
    while True:
        end = start_ranks(ready, words)
        fault = _fault(end)
        if fault is None:
            return end.exit_code
        faults.append(fault)
        decision = decide(faults, restarts=restarts, shrink=config.shrink)
        _keep(end, fault, decision, attempt=len(faults), output=Path(config.output))
        if decision.action == "end":
            if restarts:
                print_titled("restart", f"none: {decision.reason}", console)
            return end.exit_code
        print_titled("restart", f"{len(faults)} of {restarts}: {decision.reason}", console)


def _fault(end: JobEnd) -> Fault | None:
    """Return the fault that ended a job; None if it succeeded."""
    blamed = end.blamed
    if blamed is None:
        return None
    step = blamed.note.step if blamed.note is not None and blamed.note.action else None
    return Fault(end.exit_code, blamed.rank, step, len(end.ends))


def _keep(end: JobEnd, fault: Fault, decision: Decision, *, attempt: int, output: Path) -> None:
    """Append a fault to the failures of a run, if the run has made its directory."""
    assert end.blamed is not None, "a job without fault has nothing to keep"
    report = end.report
    record = FailureRecord(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        attempt=attempt,
        num_ranks=fault.num_ranks,
        rank=end.blamed.rank,
        device=fault.device,
        step=fault.step,
        exit_code=fault.exit_code,
        cause=report.partition("\n")[0].removeprefix("error: "),
        report=report,
        action=decision.action,
        reason=decision.reason,
        seconds={name: round(seconds, 3) for name, seconds in end.seconds().items()},
    )
    if not output.is_dir():
        return
    try:
        append_failure(output, record)
    except OSError as error:
        _log.warning("%s: the failure is not recorded: %s", error.filename, error.strerror)
