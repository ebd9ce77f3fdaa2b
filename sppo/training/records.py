"""Metrics of the steps of a run, combined over all ranks, and their records: files and lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from sppo.planning.elastic.step_plan import StepPlan
from sppo.report.display import TrainingDisplay
from sppo.report.metrics import METRICS_FILE, JsonlSink, StepMetrics, TensorBoardSink
from sppo.report.step_line import step_line
from sppo.training.job import Job, Ranks
from sppo.training.outcome import TrainingOutcome
from sppo.training.run_directory import TENSORBOARD_DIRECTORY
from sppo.training.step import DoneStep
from sppo.training.step_work import StepWork


def measure_step(
    job: Job,
    outcome: TrainingOutcome,
    work: StepWork,
    done: DoneStep,
    *,
    lr: float,
    learnt: Mapping[str, Any],
) -> StepMetrics:
    """Return the metrics of a step, and add its measurements to the outcome. Collective.

    Times, device memory and waits are maxima over all ranks; offloaded bytes and the bytes in host
    memory and on disks are sums over all ranks. Only the rates of copies are those of this rank.

    Args:
        job: Job that trains the run.
        outcome: Outcome of the run.
        work: Work of the step.
        done: Results of the step on this rank.
        lr: Scheduled learning rate, also if the update was skipped.
        learnt: Metrics of the correction of predicted times.
    """
    peers, result, copies = job.ranks.peers, done.result, done.copies
    own_peak = job.device.peak_bytes()
    forward_s, backward_s, rest_s, seconds, peak, exposed_s, predicted_s, waited_s = peers.largest(
        [
            *(result.forward_s, result.backward_s, done.rest_s, done.seconds),
            *(own_peak, copies.exposed_s, work.step_s),
            0.0 if work.samples is None else work.samples.wait_s,
        ]
    )
    offloaded, host_bytes, disk_bytes = peers.total(
        [copies.total_out_bytes, copies.host_bytes, copies.disk_bytes]
    )
    outcome.add(work, done, (forward_s, backward_s, rest_s), peak_bytes=own_peak)
    tokens, model_flops, executed_flops = _of_replicas(
        job.ranks, work.tokens, work.model_flops, work.executed_flops
    )
    peak_flops_per_s = outcome.base.peak_flops_per_s
    most_flops = peak_flops_per_s and peak_flops_per_s * job.ranks.mesh.shape.num_ranks * seconds
    packing = {} if work.samples is None else _packing(work.samples.replica.plan, done, job.ranks)
    return StepMetrics(
        step=work.number,
        loss=done.sums.loss,
        grad_norm=done.sums.norm,
        lr=lr,
        tokens=int(tokens),
        labels=done.sums.num_valid,
        step_s=seconds,
        tokens_per_s=tokens / seconds,
        mfu=most_flops and model_flops / most_flops,
        hfu=most_flops and executed_flops / most_flops,
        predicted_step_s=predicted_s,
        device_peak_bytes=int(peak),
        host_peak_bytes=int(host_bytes),
        offloaded_bytes=int(offloaded),
        exposed_copy_s=exposed_s,
        copy_out_bytes_per_s=copies.out_bytes_per_s or None,
        copy_back_bytes_per_s=copies.back_bytes_per_s or None,
        disk_peak_bytes=int(disk_bytes),
        skipped=done.lr is None,
        planning_wait_s=None if work.samples is None else waited_s,
        **packing,
        **learnt,
    )


def _packing(plan: StepPlan, done: DoneStep, ranks: Ranks) -> dict[str, Any]:
    """Return metrics of packing and idle time in a step of samples. Collective."""
    shape = ranks.mesh.shape
    busy_s, actions_s = ranks.peers.total(
        [done.result.forward_s + done.result.backward_s, done.seconds - done.rest_s]
    )
    samples, split, batched, hybrid, padding, bubble = _of_replicas(
        ranks,
        *(plan.num_samples, plan.num_split, plan.num_batched, plan.num_hybrid),
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
        "program_digest": ranks.peers.broadcast(plan.program.digest()),
    }


def _of_replicas(ranks: Ranks, *values: float) -> Sequence[float]:
    """Return the sum of each value over all replicas. Collective."""
    return ranks.peers.total([value * ranks.mesh.speaks_for_replica for value in values])


_STANDARD_OUTPUT = "standard output"


class StepRecords:
    """Records of the steps of one run; rank 0 writes the files.

    A failure to write does not end the step: :attr:`failure` holds the first error, and the run
    ends after its state is saved.
    """

    def __init__(self, job: Job, outcome: TrainingOutcome) -> None:
        self._run, self._ranks, self._outcome = job.run, job.ranks, outcome
        self._first_step = outcome.first_step
        self._started = time.perf_counter()
        self._sinks: list[JsonlSink | TensorBoardSink] = []
        self.display = TrainingDisplay(
            job.console, total_steps=job.run.train.steps, first_step=outcome.first_step
        )
        self.failure: OSError | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the files and the display for the duration of the context. Collective."""
        self._started = time.perf_counter()
        with ExitStack() as stack:
            self._ranks.decided_by_main(lambda: self._open_sinks(stack))
            stack.enter_context(self.display)
            yield

    def _open_sinks(self, stack: ExitStack) -> None:
        """Open the files of metrics, which ``stack`` closes."""
        output, done = self._outcome.output, self._first_step
        jsonl = JsonlSink(output / METRICS_FILE, resume_step=done)
        self._sinks.append(stack.enter_context(closing(jsonl)))
        if self._run.train.tensorboard:
            events = TensorBoardSink(output / TENSORBOARD_DIRECTORY, resume_step=done)
            self._sinks.append(stack.enter_context(closing(events)))

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
            for sink in self._sinks:
                sink.write(metrics)
        with self._recording(_STANDARD_OUTPUT):
            self.display.step_done(line)

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
