"""Training as a function, and what a run has left in its output directory."""

from __future__ import annotations

import json
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, list_checkpoints
from sppo.config import RunConfig, run_sections
from sppo.interface.arguments import check_argument
from sppo.interface.starting import made_ready, start_ranks, train_as_rank
from sppo.output_file import write_json
from sppo.parallel.job.signals import STOP_CODES
from sppo.planning.plan import ExecutionPlan, plan_json, read_plan
from sppo.report.metrics import METRICS_FILE, StepMetrics, read_metrics


class RunFailedError(RuntimeError):
    """Ranks that were started for a run failed; stderr says which one and why.

    Attributes:
        exit_code: Of the rank to blame, as ``sppo train`` ends with it.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the ranks ended with exit code {exit_code}; stderr says why")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """State of a run so far, as its output directory has it.

    Attributes:
        output: The directory, by its absolute path.
        steps: Of training, done and recorded.
        metrics: Of each of them, in order.
        interrupted_by: Name of the signal that ended the last call early; None if none did.
    """

    output: Path
    steps: int
    metrics: tuple[StepMetrics, ...] = field(repr=False)
    interrupted_by: str | None = None

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step, nats per label; NaN where a step had none."""
        return [step.loss for step in self.metrics]

    @property
    def plan(self) -> ExecutionPlan:
        """Return the plan that was run, with its predictions.

        Raises:
            ValueError: there is none yet, or it is damaged.
        """
        from sppo.training.run_directory import PLAN_FILE

        return read_plan(self.output / PLAN_FILE)

    @property
    def summary(self) -> dict[str, Any]:
        """``run_summary.json``: predicted against measured, of the last call that trained.

        Raises:
            OSError: there is none.
        """
        from sppo.training.run_directory import SUMMARY_FILE

        found: dict[str, Any] = json.loads((self.output / SUMMARY_FILE).read_text("utf-8"))
        return found

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint; None before the first."""
        found = list_checkpoints(self.output / CHECKPOINTS_DIRECTORY)
        return found[0][1] if found else None


def train(
    run: RunConfig, plan: ExecutionPlan | None = None, *, progress: bool = True
) -> TrainedRun:
    """Train until ``train.steps`` are done; goes on from the newest checkpoint if there is one.

    Does what ``sppo train`` does, in this process where one rank trains; with degrees of
    parallelism above 1 it starts that many processes on this machine. In a program that torchrun or
    srun started, every process calls it and is one rank. Call it in the main thread: Ctrl-C and
    SIGTERM end it after the step under way is given up and the state is saved.

    Args:
        run: of :func:`sppo.load_run`.
        plan: of :func:`sppo.solve`, to follow; None decides here, for the memory that is free.
        progress: print what the run is, a line for each step, and a summary; a notebook with
            ipywidgets shows bars, too. Without it only warnings are logged.

    Raises:
        TypeError: ``run`` or ``plan`` is something else, e.g. a path.
        ValueError: input that cannot be trained on; nothing was changed.
        MemoryError: it does not fit.
        RunFailedError: a rank that was started failed.
        sppo.training.steps.nonfinite.NonFiniteError: too many steps in a row with NaN or inf.
        OSError: the disk is full or fails; what was saved is whole.
    """
    from rich.console import Console

    check_argument("sppo.train", "run", run, RunConfig)
    check_argument("sppo.train", "plan", plan, ExecutionPlan, None)
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("sppo.train: call it in the main thread, which alone hears signals")
    console = Console(quiet=not progress)
    ready = made_ready(run, plan, source="the plan", console=console)
    if not ready.starts_ranks:
        outcome = train_as_rank(ready, console=console, command="the same call")
        return trained_run(ready.run, interrupted_by=outcome.interrupted_by)
    with tempfile.TemporaryDirectory(prefix="sppo-") as directory:
        words = ["train", *_as_files(run, plan, Path(directory))]
        words += [] if progress else ["--quiet"]
        code = start_ranks(ready, words, console=console)
    stopped = STOP_CODES.get(code)
    if code != 0 and stopped is None:
        raise RunFailedError(code)
    return trained_run(ready.run, interrupted_by=stopped)


def trained_run(run: RunConfig, *, interrupted_by: str | None = None) -> TrainedRun:
    """Return what ``run`` has done so far; of a run that has not begun, nothing.

    Args:
        run: with the ``train.output`` to look into.
        interrupted_by: name of the signal that ended it early.

    Raises:
        TypeError: ``run`` is something else, e.g. a path.

    >>> import sppo
    >>> run = sppo.load_run(
    ...     {"model": {"preset": "tiny"}, "data": {"tokens": "data"}, "sequence": {"length": 64}},
    ...     {"train.output": "/nonexistent"},
    ... )
    >>> sppo.trained_run(run).steps
    0
    """
    check_argument("sppo.trained_run", "run", run, RunConfig)
    output = Path(run.train.output).absolute()
    file = output / METRICS_FILE
    metrics = tuple(read_metrics(file)) if file.is_file() else ()
    return TrainedRun(output, metrics[-1].step if metrics else 0, metrics, interrupted_by)


def _as_files(run: RunConfig, plan: ExecutionPlan | None, directory: Path) -> list[str]:
    """Write a run and the plan that it follows, and return the arguments that name them."""
    run_file, plan_file = directory / "run.yaml", directory / "plan.json"
    write_json(run_file, run_sections(run))  # JSON is YAML
    if plan is None:
        return [str(run_file)]
    write_json(plan_file, plan_json(plan))
    return [str(run_file), "--plan", str(plan_file)]
