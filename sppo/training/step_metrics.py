"""Metrics of a step, combined from the measurements of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sppo.offload.copy_report import CopyReport
from sppo.report.metrics import StepMetrics
from sppo.training.devices.device import Device
from sppo.training.outcome import TrainingOutcome
from sppo.training.ranks import Ranks
from sppo.training.steps.measured import StepPhases
from sppo.training.steps.step import DoneStep
from sppo.training.steps.step_work import StepSource, StepWork


class StepMeasures:
    """Combines the measurements of all ranks into the metrics of each step.

    Args:
        outcome: Outcome of the run; measurements of each step are added to it.
        source: Source of the steps' work; corrects its predictions by measured times.
        ranks: All ranks of the run.
        device: Device of this rank.
        peak_flops_per_s: Peak FLOPs per second of one device; None if unknown.
    """

    def __init__(
        self,
        outcome: TrainingOutcome,
        source: StepSource,
        *,
        ranks: Ranks,
        device: Device,
        peak_flops_per_s: float | None,
    ) -> None:
        self._outcome, self._source = outcome, source
        self._mesh, self._peers, self._device = ranks.mesh, ranks.peers, device
        self._peak_flops_per_s = peak_flops_per_s

    def measure(self, step: int, done: DoneStep, work: StepWork, *, lr: float) -> StepMetrics:
        """Return the metrics of a step. Collective.

        Times, device memory and waits are maxima over all ranks; offloaded bytes and the bytes in
        host memory and on disks are sums over all ranks. Only the rates of copies are those
        of this rank.

        Args:
            step: Number of the step, counted from 0.
            done: Results of the step on this rank.
            work: Work of the step.
            lr: Scheduled learning rate, also if the update was skipped.
        """
        result, copies = done.result, done.copies
        own_peak = self._device.peak_bytes()
        forward_s, backward_s, rest_s, seconds, peak, exposed_s, predicted_s, planning_wait_s = (
            self._peers.largest(
                [
                    result.forward_s,
                    result.backward_s,
                    done.rest_s,
                    done.seconds,
                    own_peak,
                    copies.exposed_s,
                    work.step_s,
                    work.planning_wait_s,
                ]
            )
        )
        offloaded, host_bytes, disk_bytes = self._peers.total(
            [copies.total_out_bytes, copies.host_bytes, copies.disk_bytes]
        )
        self._record(work, copies, StepPhases(forward_s, backward_s, rest_s), own_peak)
        tokens, model_flops, executed_flops = (
            int(value)
            for value in self._of_replicas(work.tokens, work.model_flops, work.executed_flops)
        )
        return StepMetrics(
            step=step + 1,
            loss=done.sums.loss,
            grad_norm=done.sums.norm,
            lr=lr,
            tokens=tokens,
            labels=done.sums.num_valid,
            step_s=seconds,
            tokens_per_s=tokens / seconds,
            mfu=self._utilization(model_flops / seconds),
            hfu=self._utilization(executed_flops / seconds),
            predicted_step_s=predicted_s,
            device_peak_bytes=int(peak),
            host_peak_bytes=int(host_bytes),
            offloaded_bytes=int(offloaded),
            exposed_copy_s=exposed_s,
            copy_out_bytes_per_s=copies.out_bytes_per_s or None,
            copy_back_bytes_per_s=copies.back_bytes_per_s or None,
            disk_peak_bytes=int(disk_bytes),
            skipped=done.lr is None,
            **self._packing(work, done, planning_wait_s=planning_wait_s),
            **self._source.learn(work, done),
        )

    def _utilization(self, flops_per_s: float) -> float | None:
        """Return the rate of all ranks over the peak of all devices; None if that is unknown."""
        if self._peak_flops_per_s is None:
            return None
        return flops_per_s / self._peak_flops_per_s / self._mesh.shape.num_ranks

    def _record(
        self, work: StepWork, copies: CopyReport, phases: StepPhases, peak_bytes: int
    ) -> None:
        """Add a step to the outcome of the run: its copies, phases and peaks, and as planned."""
        outcome = self._outcome
        outcome.copies.append(copies)
        outcome.peak_bytes = max(outcome.peak_bytes, peak_bytes)
        outcome.phases.append(phases)
        outcome.planned_phases.append(work.phases)
        if outcome.most_planned is None or (
            work.memory.total_bytes > outcome.most_planned.total_bytes
        ):
            outcome.most_planned = work.memory

    def _packing(self, work: StepWork, done: DoneStep, *, planning_wait_s: float) -> dict[str, Any]:
        """Return metrics of packing and idle time in a step of samples; {} without samples."""
        plan = work.planned
        if plan is None:
            return {}
        busy_s = done.result.forward_s + done.result.backward_s
        actions_s = done.seconds - done.rest_s
        (busy_s, actions_s) = self._peers.total([busy_s, actions_s])
        samples, split, batched, hybrid, padding, bubble = self._of_replicas(
            plan.num_samples,
            plan.num_split,
            plan.num_batched,
            plan.num_hybrid,
            plan.packed.padding_tokens,
            plan.bubble_fraction,
        )
        replicas = self._mesh.shape.data_parallel
        return {
            "samples": int(samples),
            "split_subsequences": int(split),
            "batched_subsequences": int(batched),
            "hybrid_subsequences": int(hybrid),
            "padding_tokens": int(padding),
            **self._bubbles(bubble / replicas, 1 - busy_s / actions_s),
            "planning_wait_s": planning_wait_s,
            "program_digest": self._peers.broadcast(plan.program.digest()),
        }

    def _bubbles(self, planned: float, measured: float) -> dict[str, float]:
        """Return metrics of the idle share of pipeline ranks; {} without a pipeline."""
        if self._mesh.shape.pipeline_parallel == 1:
            return {}
        return {"planned_bubble_fraction": planned, "bubble_fraction": max(0.0, measured)}

    def _of_replicas(self, *values: float) -> Sequence[float]:
        """Return the sum of each value over all replicas. Collective."""
        return self._peers.total([value * self._mesh.speaks_for_replica for value in values])
