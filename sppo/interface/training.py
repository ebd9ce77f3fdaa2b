"""Training in the Python interface, and the results in a run's output directory."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, list_checkpoints
from sppo.config import RunConfig, run_sections
from sppo.interface.arguments import check_argument
from sppo.output_file import write_json
from sppo.parallel.job.signals import STOP_CODES
from sppo.planning.plan import ExecutionPlan, plan_json, read_plan
from sppo.report.metrics import METRICS_FILE, StepMetrics, read_metrics
from sppo.report.run_summary import RunSummary, read_summary
from sppo.training.start import made_ready, start_ranks, train_as_rank


class RunFailedError(RuntimeError):
    """Failure of ranks that were started for a run; stderr says which rank failed and why.

    Attributes:
        exit_code: Exit code of the rank that failed first, as ``sppo train`` would return it.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the ranks ended with exit code {exit_code}; stderr says why")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """State of a run so far, read from its output directory.

    Attributes:
        output: Absolute path of the output directory.
        steps: Number of training steps done and recorded.
        metrics: Metrics of each step, in order.
        interrupted_by: Name of the signal that ended the last call early; None if there was none.
    """

    output: Path
    steps: int
    metrics: tuple[StepMetrics, ...] = field(repr=False)
    interrupted_by: str | None = None

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step in nats per label; NaN for a step without loss."""
        return [step.loss for step in self.metrics]

    @property
    def plan(self) -> ExecutionPlan:
        """Executed plan, with its predictions.

        Raises:
            ValueError: There is no plan yet, or it is damaged.
        """
        from sppo.training.run_directory import PLAN_FILE

        return read_plan(self.output / PLAN_FILE)

    @property
    def summary(self) -> RunSummary:
        """Predicted and measured figures of the last training, from ``run_summary.json``.

        Raises:
            OSError: There is no summary.
            ValueError: The summary is damaged.
        """
        from sppo.training.run_directory import SUMMARY_FILE

        return read_summary(self.output / SUMMARY_FILE)

    @property
    def checkpoint(self) -> Path | None:
        """Newest checkpoint; None before the first one."""
        found = list_checkpoints(self.output / CHECKPOINTS_DIRECTORY)
        return found[0][1] if found else None


def train(
    run: RunConfig, plan: ExecutionPlan | None = None, *, progress: bool = True
) -> TrainedRun:
    """Train until ``train.steps`` are done, from the newest checkpoint if there is one.

    Does the same as ``sppo train``. A run of one rank trains in this process; with degrees of
    parallelism above 1, written or chosen for several GPUs, the call starts one process per rank on
    this machine. In a program started
    by torchrun or srun, every process makes the call and is one rank. Call this function in the
    main thread: on Ctrl-C or SIGTERM the current step is abandoned, the state is saved, and the
    call returns.

    Args:
        run: Run configuration from :func:`sppo.load_run`.
        plan: Plan from :func:`sppo.solve` to follow; None makes a plan for the memory that is free.
        progress: Print a description of the run, a line for each step, and a summary; in a notebook
            with ipywidgets, also show bars. False logs only warnings.

    Raises:
        TypeError: ``run`` or ``plan`` has another type, e.g. a path.
        ValueError: The run cannot be trained; nothing was changed.
        MemoryError: The run does not fit into memory.
        RunFailedError: A rank that was started failed.
        sppo.training.steps.nonfinite.NonFiniteError: Too many consecutive steps with NaN or inf.
        OSError: The disk is full or fails; files saved before are complete.
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
        code = start_ranks(ready, words)
    stopped = STOP_CODES.get(code)
    if code != 0 and stopped is None:
        raise RunFailedError(code)
    return trained_run(ready.run, interrupted_by=stopped)


def trained_run(run: RunConfig, *, interrupted_by: str | None = None) -> TrainedRun:
    """Return the state of `run` so far: no steps if the run has not started.

    Args:
        run: Run configuration whose ``train.output`` is read.
        interrupted_by: Name of the signal that ended the run early.

    Raises:
        TypeError: ``run`` has another type, e.g. a path.

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
    """Write a run and its plan as files; return the command-line arguments that name the files."""
    run_file, plan_file = directory / "run.yaml", directory / "plan.json"
    write_json(run_file, run_sections(run))  # JSON is YAML
    if plan is None:
        return [str(run_file)]
    write_json(plan_file, plan_json(plan))
    return [str(run_file), "--plan", str(plan_file)]
