"""Report of a finished run: its files and plots, and predicted against measured figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY
from sppo.config import RunConfig
from sppo.plots.loss import loss_plot
from sppo.report.lines import print_line
from sppo.report.metrics import METRICS_FILE, StepMetrics, read_metrics
from sppo.report.run_summary import RunSummary, read_summary, write_summary
from sppo.report.summary_tables import print_summary
from sppo.training.checks.preflight import CheckedRun
from sppo.training.executed_step import timeline_writers
from sppo.training.job import Job
from sppo.training.outcome import TrainingOutcome
from sppo.training.run_directory import LOSS_PLOT, RESULT_FILES, SUMMARY_FILE
from sppo.training.summarize import summarize

_WRITTEN = (*RESULT_FILES, CHECKPOINTS_DIRECTORY)
"""Names of entries of the output directory, in the order in which the report lists them."""


def report(job: Job, checked: CheckedRun, outcome: TrainingOutcome, *, command: str) -> None:
    """Write the summary and the plots of a run, and print the report.

    A run whose steps were all done by an earlier call keeps its summary. The state is saved
    already, so a file that cannot be written only causes a warning.

    Args:
        job: Job that trained the run.
        checked: Result of the checks of the same run.
        outcome: Outcome of training.
        command: Command that resumes the run, named in the report of an interrupted run.
    """
    run, console = job.run, job.console
    if _was_done(outcome):
        _report_nothing_to_do(run, outcome, console=console)
        return
    output = outcome.output
    steps = read_metrics(output / METRICS_FILE)
    summary = summarize(steps, checked, outcome)
    missing = _write(_writers(run, steps, summary, outcome), outcome, console=console)
    print_summary(summary, console=console)
    written = [name for name in _WRITTEN if name not in missing and (output / name).exists()]
    print_line(f"{output}: {', '.join(written)}", console)
    if outcome.interrupted_by is not None:
        print_line(
            f"stopped by {outcome.interrupted_by} after step {outcome.done_steps} of "
            f"{run.train.steps}, {run.train.steps - outcome.done_steps} left; to go on:",
            console,
        )
        print_line(command, console, wraps=False)


def _report_nothing_to_do(run: RunConfig, outcome: TrainingOutcome, *, console: Console) -> None:
    """Print that all steps were done by an earlier call; draw the loss plot if it is missing."""
    print_line(
        f"{outcome.output}: all {run.train.steps} steps were done before, nothing to do; "
        "raise train.steps to go on",
        console,
    )
    if not (outcome.output / LOSS_PLOT).exists():
        _write({LOSS_PLOT: _loss_writer(run, outcome)}, outcome, console=console)


def _writers(
    run: RunConfig,
    steps: Sequence[StepMetrics],
    summary: RunSummary,
    outcome: TrainingOutcome,
) -> dict[str, Callable[[Path], None]]:
    """Return the functions that write the files of a run, by file name."""
    writers: dict[str, Callable[[Path], None]] = {SUMMARY_FILE: partial(write_summary, summary)}
    if steps:
        writers[LOSS_PLOT] = _loss_writer(run, outcome)
    if outcome.timelines is not None:
        writers |= timeline_writers(outcome.timelines)
    return writers


def _loss_writer(run: RunConfig, outcome: TrainingOutcome) -> Callable[[Path], None]:
    metrics = outcome.output / METRICS_FILE
    return partial(loss_plot, metrics, terms=run.train.beside_cross_entropy)


def _write(
    writers: Mapping[str, Callable[[Path], None]], outcome: TrainingOutcome, *, console: Console
) -> list[str]:
    """Write all files; warn of each that cannot be written, and return the names of these."""
    missing = []
    for name, write in writers.items():
        path = outcome.output / name
        try:
            write(path)
        except Exception as error:  # of any kind: the state of the run is saved
            missing.append(name)
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            told = "; ".join([why or type(error).__name__, *getattr(error, "__notes__", [])])
            print_line(f"warning: {path} cannot be written: {told}", console)
    if missing:
        writable = [name for name in missing if name in (SUMMARY_FILE, LOSS_PLOT)]
        again = writable and outcome.saved
        hint = f"; the same command writes {', '.join(writable)}" if again else ""
        done = "done and saved" if outcome.saved else "done"
        print_line(
            f"{outcome.output}: {done} after step {outcome.done_steps}, without "
            f"{', '.join(missing)}{hint}",
            console,
        )
    return missing


def _was_done(outcome: TrainingOutcome) -> bool:
    """Return whether this call ran no step, and a summary of the earlier steps exists."""
    if outcome.done_steps > outcome.first_step or outcome.interrupted_by is not None:
        return False
    try:
        return read_summary(outcome.output / SUMMARY_FILE).steps == outcome.done_steps
    except (OSError, ValueError):
        return False
