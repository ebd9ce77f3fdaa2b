"""State of a run so far, as its output directory has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, best_checkpoint, list_checkpoints
from sppo.config.run import RunConfig
from sppo.planning.plan import ExecutionPlan, read_plan
from sppo.report.metrics import METRICS_FILE, StepMetrics, read_metrics, read_records
from sppo.report.run_summary import RunSummary, read_summary
from sppo.report.validation import VALIDATION_FILE, ValidationMetrics
from sppo.training.run_directory import PLAN_FILE, SUMMARY_FILE


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
    def validations(self) -> list[ValidationMetrics]:
        """Results of each set in each validation, in order; empty without any."""
        return read_records(self.output / VALIDATION_FILE, ValidationMetrics)

    @property
    def plan(self) -> ExecutionPlan:
        """Executed plan, with its predictions.

        Raises:
            ValueError: There is no plan yet, or it is damaged.
        """
        return read_plan(self.output / PLAN_FILE)

    @property
    def summary(self) -> RunSummary:
        """Predicted and measured figures of the last training, from ``run_summary.json``.

        Raises:
            OSError: There is no summary.
            ValueError: The summary is damaged.
        """
        return read_summary(self.output / SUMMARY_FILE)

    @property
    def checkpoint(self) -> Path | None:
        """Newest checkpoint; None before the first one."""
        found = list_checkpoints(self.output / CHECKPOINTS_DIRECTORY)
        return found[0][1] if found else None

    @property
    def best_checkpoint(self) -> Path | None:
        """Best checkpoint by what the validation watches; None if none is kept."""
        return best_checkpoint(self.output / CHECKPOINTS_DIRECTORY)


def trained_run(run: RunConfig, *, interrupted_by: str | None = None) -> TrainedRun:
    """Return the state of `run` so far: no steps if the run has not started.

    Args:
        run: Run configuration whose ``train.output`` is read.
        interrupted_by: Name of the signal that ended the run early.

    >>> import sppo
    >>> run = sppo.load_run(
    ...     {"model": {"preset": "tiny"}, "data": {"tokens": "data"}, "sequence": {"length": 64}},
    ...     {"train.output": "/nonexistent"},
    ... )
    >>> sppo.trained_run(run).steps
    0
    """
    output = Path(run.train.output).absolute()
    file = output / METRICS_FILE
    metrics = tuple(read_metrics(file)) if file.is_file() else ()
    return TrainedRun(output, metrics[-1].step if metrics else 0, metrics, interrupted_by)
