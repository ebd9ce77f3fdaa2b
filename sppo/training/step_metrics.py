"""Metrics of a step, combined from the measurements of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sppo.report.metrics import StepMetrics
from sppo.training.job import Job
from sppo.training.outcome import TrainingOutcome
from sppo.training.ranks import Ranks
from sppo.training.steps.measured import StepPhases
from sppo.training.steps.step import DoneStep
from sppo.training.steps.step_work import StepWork


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
    forward_s, backward_s, rest_s, seconds, peak, exposed_s, predicted_s, planning_wait_s = (
        peers.largest(
            [
                result.forward_s,
                result.backward_s,
                done.rest_s,
                done.seconds,
                own_peak,
                copies.exposed_s,
                work.step_s,
                0.0 if work.samples is None else work.samples.wait_s,
            ]
        )
    )
    offloaded, host_bytes, disk_bytes = peers.total(
        [copies.total_out_bytes, copies.host_bytes, copies.disk_bytes]
    )
    outcome.add(work, done, StepPhases(forward_s, backward_s, rest_s), peak_bytes=own_peak)
    tokens, model_flops, executed_flops = _of_replicas(
        job.ranks, work.tokens, work.model_flops, work.executed_flops
    )

    def utilization(flops_per_s: float) -> float | None:
        """Return the rate of all ranks over the peak of all devices; None if that is unknown."""
        peak_flops_per_s = outcome.base.peak_flops_per_s
        if peak_flops_per_s is None:
            return None
        return flops_per_s / peak_flops_per_s / job.ranks.mesh.shape.num_ranks

    return StepMetrics(
        step=work.number,
        loss=done.sums.loss,
        grad_norm=done.sums.norm,
        lr=lr,
        tokens=int(tokens),
        labels=done.sums.num_valid,
        step_s=seconds,
        tokens_per_s=tokens / seconds,
        mfu=utilization(model_flops / seconds),
        hfu=utilization(executed_flops / seconds),
        predicted_step_s=predicted_s,
        device_peak_bytes=int(peak),
        host_peak_bytes=int(host_bytes),
        offloaded_bytes=int(offloaded),
        exposed_copy_s=exposed_s,
        copy_out_bytes_per_s=copies.out_bytes_per_s or None,
        copy_back_bytes_per_s=copies.back_bytes_per_s or None,
        disk_peak_bytes=int(disk_bytes),
        skipped=done.lr is None,
        **_packing(work, done, job.ranks, planning_wait_s=planning_wait_s),
        **learnt,
    )


def _packing(
    work: StepWork, done: DoneStep, ranks: Ranks, *, planning_wait_s: float
) -> dict[str, Any]:
    """Return metrics of packing and idle time in a step of samples; {} without samples."""
    if work.samples is None:
        return {}
    plan, shape = work.samples.replica.plan, ranks.mesh.shape
    busy_s, actions_s = ranks.peers.total(
        [done.result.forward_s + done.result.backward_s, done.seconds - done.rest_s]
    )
    samples, split, batched, hybrid, padding, bubble = _of_replicas(
        ranks,
        plan.num_samples,
        plan.num_split,
        plan.num_batched,
        plan.num_hybrid,
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
        "planning_wait_s": planning_wait_s,
        "program_digest": ranks.peers.broadcast(plan.program.digest()),
    }


def _of_replicas(ranks: Ranks, *values: float) -> Sequence[float]:
    """Return the sum of each value over all replicas. Collective."""
    return ranks.peers.total([value * ranks.mesh.speaks_for_replica for value in values])
