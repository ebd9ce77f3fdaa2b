"""Records of the steps of a run: metrics over all ranks, their lines and files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

from sppo.data.sample_rows import TrainingData
from sppo.planning.elastic.step_plan import StepPlan
from sppo.report.display import TrainingDisplay
from sppo.report.expert_load import expert_metrics
from sppo.report.metrics import METRICS_FILE, JsonlSink, StepMetrics
from sppo.report.step_line import step_line
from sppo.report.validation import VALIDATION_FILE, ValidationMetrics
from sppo.training.job import Job
from sppo.training.records.outcome import TrainingOutcome
from sppo.training.records.source_losses import by_source
from sppo.training.records.tracking import tracked
from sppo.training.step import DoneStep, StepWork


class _RankFigures(NamedTuple):
    """Figures of a step of which the largest over all ranks is recorded."""

    forward_s: float
    backward_s: float
    rest_s: float
    step_s: float
    peak_bytes: float
    exposed_copy_s: float
    predicted_step_s: float
    planning_wait_s: float


def _packing(plan: StepPlan, done: DoneStep, job: Job) -> dict[str, Any]:
    """Return metrics of packing and idle time in a step of samples. Collective."""
    shape = job.mesh.shape
    busy_s, actions_s = job.peers.total(
        [done.result.forward_s + done.result.backward_s, done.seconds - done.rest_s]
    )
    samples, split, batched, hybrid, padding, bubble = _of_replicas(
        job,
        plan.num_samples,
        *(plan.kinds[kind] for kind in ("split", "batched", "hybrid")),
        plan.packed.padding_tokens,
        plan.bubble_fraction,
    )
    bubbles = {
        "planned_bubble_fraction": bubble / shape.data_parallel,
        "bubble_fraction": max(0.0, 1 - busy_s / actions_s),
    }
    return {
        "samples": int(samples),
        "split_subsequences": int(split),
        "batched_subsequences": int(batched),
        "hybrid_subsequences": int(hybrid),
        "padding_tokens": int(padding),
        **(bubbles if shape.pipeline_parallel > 1 else {}),
        "program_digest": job.peers.broadcast(plan.program.digest()),
    }


def _of_replicas(job: Job, *values: float) -> Sequence[float]:
    """Return the sum of each value over all replicas. Collective."""
    return job.peers.total([value * job.mesh.speaks_for_replica for value in values])


_STANDARD_OUTPUT = "standard output"


class StepRecords:
    """Records of the steps of one run; rank 0 writes the files.

    A failure to write does not end the step: :attr:`failure` holds the first error, and the run
    ends after its state is saved.
    """

    def __init__(self, job: Job, data: TrainingData, outcome: TrainingOutcome) -> None:
        self._job, self._run, self._outcome = job, job.run, outcome
        self._data = data
        self._first_step = outcome.first_step
        self._started = time.perf_counter()
        self._file: JsonlSink | None = None
        self._validations: JsonlSink | None = None
        self.display = TrainingDisplay(
            job.console, total_steps=job.run.train.steps, first_step=outcome.first_step
        )
        self.failure: OSError | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the files and the display for the duration of the context. Collective."""
        self._started = time.perf_counter()
        with ExitStack() as stack:
            self._job.peers.decided_by_main(lambda: self._open_files(stack))
            if self._job.mesh.is_main and self._run.trackers:
                stack.enter_context(tracked(self._run, self._outcome.output))
            stack.enter_context(self.display)
            yield

    def _open_files(self, stack: ExitStack) -> None:
        """Open the files of metrics and validations, which ``stack`` closes."""
        output, done = self._outcome.output, self._first_step
        self._file = JsonlSink(output / METRICS_FILE, resume_step=done)
        stack.enter_context(closing(self._file))
        if self._run.validation is not None:
            path = output / VALIDATION_FILE
            self._validations = JsonlSink(path, resume_step=done, kind=ValidationMetrics)
            stack.enter_context(closing(self._validations))

    def measured(
        self, work: StepWork, done: DoneStep, *, lr: float, learnt: Mapping[str, Any]
    ) -> StepMetrics:
        """Return the metrics of a step, and add its measurements to the outcome. Collective.

        Times, device memory and waits are maxima over all ranks; offloaded bytes and the bytes in
        host memory and on disks are sums over all ranks. Only the rates of copies are those of this
        rank.

        Args:
            work: Work of the step.
            done: Results of the step on this rank.
            lr: Scheduled learning rate, also if the update was skipped.
            learnt: Metrics of the correction of predicted times.
        """
        job, copies, samples = self._job, done.copies, work.samples
        loads_LX = done.expert_loads_LX
        own = _RankFigures(
            forward_s=done.result.forward_s,
            backward_s=done.result.backward_s,
            rest_s=done.rest_s,
            step_s=done.seconds,
            peak_bytes=job.device.peak_bytes(),
            exposed_copy_s=copies.exposed_s,
            predicted_step_s=work.step_s,
            planning_wait_s=0.0 if samples is None else samples.wait_s,
        )
        largest = _RankFigures(*job.peers.largest(own))
        phases_s = (largest.forward_s, largest.backward_s, largest.rest_s)
        self._outcome.add(work, done, phases_s, peak_bytes=int(own.peak_bytes))
        offloaded_bytes, host_bytes, disk_bytes = job.peers.total(
            [copies.total_out_bytes, copies.host_bytes, copies.disk_bytes]
        )
        tokens, model_flops, executed_flops = _of_replicas(
            job, work.tokens, work.model_flops, work.executed_flops
        )
        peak_flops_per_s = self._outcome.base.peak_flops_per_s
        most_flops = peak_flops_per_s and (
            peak_flops_per_s * job.mesh.shape.num_ranks * largest.step_s
        )
        return StepMetrics(
            step=work.number,
            loss=done.sums.loss,
            grad_norm=done.sums.norm,
            clipped=None if done.lr is None else done.clipped,
            norms=done.norms,
            experts=None if loads_LX is None else expert_metrics(loads_LX.numpy()),
            sources=by_source(work, done.result, self._data, job),
            lr=lr,
            tokens=int(tokens),
            labels=done.sums.num_valid,
            step_s=largest.step_s,
            tokens_per_s=tokens / largest.step_s,
            mfu=most_flops and model_flops / most_flops,
            hfu=most_flops and executed_flops / most_flops,
            predicted_step_s=largest.predicted_step_s,
            device_peak_bytes=int(largest.peak_bytes),
            host_peak_bytes=int(host_bytes),
            offloaded_bytes=int(offloaded_bytes),
            exposed_copy_s=largest.exposed_copy_s,
            copy_out_bytes_per_s=copies.out_bytes_per_s or None,
            copy_back_bytes_per_s=copies.back_bytes_per_s or None,
            disk_peak_bytes=int(disk_bytes),
            skipped=done.lr is None,
            planning_wait_s=None if samples is None else largest.planning_wait_s,
            **({} if samples is None else _packing(samples.plan, done, job)),
            **learnt,
        )

    def record(self, metrics: StepMetrics) -> None:
        """Write the metrics of a step to the files, and show them on the display."""
        total = self._run.train.steps
        done, left = metrics.step - self._first_step, total - metrics.step
        per_step_s = (time.perf_counter() - self._started) / done
        line = step_line(
            metrics,
            total_steps=total,
            memory_capacity_bytes=self._outcome.base.capacity_bytes,
            eta_s=per_step_s * left if left else None,
            width=self.display.width,
        )
        with self._recording(str(self._outcome.output / METRICS_FILE)):
            if self._file is not None:
                self._file.write(metrics)
        with self._recording(_STANDARD_OUTPUT):
            self.display.step_done(line)

    def record_validation(self, found: Sequence[ValidationMetrics], line: str) -> None:
        """Write the results of a validation to their file, and show their line on the display."""
        with self._recording(str(self._outcome.output / VALIDATION_FILE)):
            if self._validations is not None:
                self._validations.write(*found)
        self.say(line)

    def say(self, text: str) -> None:
        """Print a line above the display; may be called within a step."""
        with self._recording(_STANDARD_OUTPUT):
            self.display.say(text)

    @contextmanager
    def _recording(self, where: str) -> Iterator[None]:
        """Keep the first OSError raised in the context as :attr:`failure`."""
        try:
            yield
        except OSError as error:
            named = OSError(error.errno, error.strerror, error.filename or where)
            self.failure = self.failure or named
