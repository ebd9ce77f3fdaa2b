"""Records of the steps of a run: metrics files, and lines on the console."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from sppo.report.display import TrainingDisplay
from sppo.report.metrics import METRICS_FILE, JsonlSink, MetricSink, StepMetrics
from sppo.report.step_line import step_line
from sppo.report.tensorboard_sink import TensorBoardSink
from sppo.training.job import Job
from sppo.training.outcome import TrainingOutcome
from sppo.training.run_directory import TENSORBOARD_DIRECTORY

_STANDARD_OUTPUT = "standard output"


class StepRecords:
    """Records of the steps of one run; rank 0 writes the files.

    A failure to write does not end the step: :attr:`failure` holds the first error, and the run
    ends after its state is saved.

    Args:
        job: Job that trains the run.
        outcome: Outcome of the run, with its output directory.
    """

    def __init__(self, job: Job, outcome: TrainingOutcome) -> None:
        self._run, self._ranks = job.run, job.ranks
        self._output, self._first_step = outcome.output, outcome.first_step
        self._capacity_bytes = outcome.base.capacity_bytes
        self._started = time.perf_counter()
        self._sinks: list[MetricSink] = []
        self.display = TrainingDisplay(
            job.console, total_steps=job.run.train.steps, first_step=outcome.first_step
        )
        self.failure: OSError | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the files and the display for the duration of the context. Collective."""
        self._started = time.perf_counter()
        with ExitStack() as stack:
            self._ranks.decided_by_main(lambda: self._sinks.extend(self._open_sinks(stack)))
            stack.enter_context(self.display)
            yield

    def record(self, metrics: StepMetrics) -> None:
        """Write the metrics of a step to the files, and show them on the display."""
        line = self._line(metrics)
        with self._recording(str(self._output / METRICS_FILE)):
            for sink in self._sinks:
                sink.write(metrics)
        with self._recording(_STANDARD_OUTPUT):
            self.display.step_done(line)

    def say(self, text: str) -> None:
        """Print a line above the display; may be called within a step."""
        with self._recording(_STANDARD_OUTPUT):
            self.display.say(text)

    def _line(self, metrics: StepMetrics) -> str:
        done, total = metrics.step - self._first_step, self._run.train.steps
        per_step_s = (time.perf_counter() - self._started) / done
        left = total - metrics.step
        return step_line(
            metrics,
            total_steps=total,
            memory_capacity_bytes=self._capacity_bytes,
            eta_s=per_step_s * left if left else None,
            width=self.display.width,
        )

    @contextmanager
    def _recording(self, where: str) -> Iterator[None]:
        """Keep the first OSError raised in the context as :attr:`failure`."""
        try:
            yield
        except OSError as error:
            named = OSError(error.errno, error.strerror, error.filename or where)
            self.failure = self.failure or named

    def _open_sinks(self, stack: ExitStack) -> Iterator[MetricSink]:
        """Open and yield the metric sinks, which ``stack`` closes."""
        output, done = self._output, self._first_step
        yield stack.enter_context(closing(JsonlSink(output / METRICS_FILE, resume_step=done)))
        if self._run.train.tensorboard:
            sink = TensorBoardSink(output / TENSORBOARD_DIRECTORY, resume_step=done)
            yield stack.enter_context(closing(sink))
