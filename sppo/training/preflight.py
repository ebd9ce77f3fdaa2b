"""All checks before the first step of a run that depend on memory, and the plan of its steps.

Rank 0 checks the run and makes its plan for all ranks. Every rank opens the data and checks the
memory, the disk and the attention of its own machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Literal

from sppo.activations.subsequence_placement import check_whole_classes
from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, list_checkpoints
from sppo.checkpoint.newest import Checkpoint, find_checkpoint
from sppo.config import RunConfig
from sppo.cost.communicators import CommunicatorUse
from sppo.cost.memory.process_growth import PLANNING_PROCESS_BYTES, REPORT_BYTES, step_bytes
from sppo.cost.memory.stage_memory import SAVED_IN_BACKGROUND
from sppo.cost.memory.state_memory import checkpoint_bytes, whole_checkpoint_bytes
from sppo.cost.trainable import trainable_of_run
from sppo.data.run_tokens import open_sources
from sppo.data.sample_rows import TrainingData
from sppo.data.samples.label_share import with_label_share
from sppo.hardware.description import DeviceKind
from sppo.offload.disk.disk_room import DiskRoom, is_memory, usable_directory
from sppo.parallel.mesh_shape import MeshShape, check_streams
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.samples_plan import STEPS, plan_samples
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import plan_run
from sppo.planning.search.choices import Degrees, multiplexed_problem, subsequence_problem
from sppo.planning.too_large import tier_too_small
from sppo.report.run_summary import AttentionSummary
from sppo.schedule.msp_groups import msp_ranges
from sppo.training.attention_in_use import check_attention, load_attention, with_attention_here
from sppo.training.devices.device import machine_of_ranks
from sppo.training.job import Job, input_facts, mesh_shape
from sppo.training.starting_checkpoint import (
    check_same_order,
    check_seen,
    has_started,
    starting_checkpoint,
)
from sppo.training.state import may_offload
from sppo.training.validation.checked import CheckedValidation, check_validation
from sppo.training.weights.base_weights import checked_start
from sppo.training.weights.starting_weights import check_weights
from sppo.units import format_bytes


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run that passed all checks, with its training data and plan."""

    job: Job
    data: TrainingData
    plan: ExecutionPlan
    """Plan of every step; in a run of samples, of a step of the longest samples."""
    attention: AttentionSummary
    """Attention back ends of the plan and of this machine."""
    start: Checkpoint | None = None
    """Checkpoint of another run whose weights the run needs: to start, or as frozen weights."""
    validation: CheckedValidation | None = None
    """Sets that are evaluated between steps; None if there are none."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free memory and disk space of this machine."""

    kind: DeviceKind
    device_bytes: int
    """Free memory of the device, for one rank."""
    host_bytes: int
    """Free host memory behind a GPU, for one rank; 0 on a CPU, whose device memory is the host's.
    """
    disk: DiskRoom
    """Disk space of the disk tier, for all ranks."""
    local_ranks: int
    """Number of ranks on this machine."""


def preflight(job: Job, plan: ExecutionPlan | None = None) -> CheckedRun:
    """Check that a run can be trained here, and make its plan unless one is given. Collective.

    An error of any rank is raised on all ranks, before anything is changed.

    Args:
        job: Job that trains the run.
        plan: Plan to follow; None to make one.

    Raises:
        ValueError: An input or the plan breaks a rule; names the rule and the fix.
        MemoryError: The run does not fit in the memory of a rank.
    """
    run, peers, device = job.run, job.peers, job.device
    peers.decided_by_main(lambda: check_weights(run))
    start = peers.decided_by_main(lambda: _start(run))
    if start is not None:
        peers.done_by_all(lambda: check_seen(start))
    data = peers.done_by_all(lambda: TrainingData.of_sources(run, open_sources(run)))
    if job.mesh.is_distributed:
        peers.check_same(input_facts(run, data.sources))
    peers.decided_by_main(lambda: data.check_labels(steps=run.train.steps))
    run = peers.decided_by_main(lambda: with_label_share(run, data, data.sources))
    if run.data.samples == "documents":
        run = run_of_longest_samples(run, longest=int(data.table.lengths.max()))
    planned = replace(job, run=run)
    if device.kind == "cpu":
        # Drawn with at the end of the run: a plan that did not account for these tens of MiB would
        # have the run killed after its last step in a small container.
        from matplotlib.backends import backend_agg  # noqa: F401
    load_attention(run, device)
    peers.barrier()  # free memory is meaningful once every rank has loaded its libraries
    plans_ahead = run.data.samples == "documents" and run.planning.ahead
    free = find_free_memory(planned, plans_ahead=plans_ahead)
    plan = peers.decided_by_main(lambda: _trainable_plan(planned, plan, data, free))
    # Every rank has read the free memory by now, and none has allocated any.
    attention = peers.done_by_all(lambda: check_attention(run, plan, device))
    peers.done_by_all(lambda: check_room(run, plan, free))
    peers.decided_by_main(lambda: check_first_checkpoint(run))
    return CheckedRun(job, data, plan, attention, start, check_validation(job, plan))


def _start(run: RunConfig) -> Checkpoint | None:
    """Return the verified checkpoint of another run whose weights a run needs, if there is one.

    It needs them to start, and, if it has frozen some of them, whenever it goes on.
    """
    if has_started(run):
        if trainable_of_run(run).is_everything:
            return None
        return checked_start(find_checkpoint(run.train.output))
    start = starting_checkpoint(run)
    if start is not None:
        check_same_order(run, start)
        checked_start(start)
    return start


# The plan


def _trainable_plan(
    job: Job, plan: ExecutionPlan | None, data: TrainingData, free: FreeMemory
) -> ExecutionPlan:
    """Return the plan of a run, made for the free memory unless one is given.

    Args:
        job: Job of the run; in a run of samples, with the length of the longest sample.
        plan: Plan to follow; None to make one.
        data: Training data of the run.
        free: Free memory of this machine.

    Raises:
        ValueError: Training does not support the plan, or no plan is possible.
        MemoryError: A step does not fit.
    """
    run, device = job.run, job.device
    if device.kind == "cpu":
        _check_step_size(run, free)
    if plan is None:
        num_ranks, local_ranks = MeshShape.of(run.parallel).num_ranks, job.local_ranks
        hardware = machine_of_ranks(run, device, num_ranks=num_ranks, local_ranks=local_ranks)
        available = free.device_bytes
        if device.kind == "cuda":  # a plan uses at most the usable memory
            hardware = with_attention_here(hardware, run, device)
            available = min(available, hardware.device.usable_bytes)
        planned = partial(
            plan_run,
            hardware=hardware,
            available_bytes=available,
            disk_bytes=free.disk.usable_bytes,  # of all ranks; the plan divides it
            host_bytes=free.host_bytes,
        )
        if run.data.samples == "documents":
            # Also in a resumed run, so that it gets the same stages and continues bit for bit.
            first = map(data.lengths, islice(data.steps(), STEPS))
            plan = plan_samples(run, planned, steps=tuple(first))
        else:
            plan = planned(run)
    check_trainable(run, plan, kind=device.kind)
    return plan


def check_trainable(run: RunConfig, plan: ExecutionPlan, *, kind: DeviceKind) -> None:
    """Raise ValueError if training does not support a plan; the solver recommends no such plan.

    Args:
        run: Validated run configuration with the degrees of the plan.
        plan: Plan to follow.
        kind: Kind of device that the run is trained on.

    Raises:
        ValueError: The plan breaks a rule; names the rule and the fix.
    """
    if plan.hardware.device.kind != kind:
        here, hint = (
            ("the CPU", "hardware.preset=laptop-cpu") if kind == "cpu" else ("a GPU", "its preset")
        )
        raise ValueError(
            f"the plan was made for {plan.hardware.name}, and this run is trained on {here}: solve "
            f"again with {hint}, or with a hardware.file of this machine, or keep the plan for "
            "sppo simulate"
        )
    degrees, by_name = Degrees.of_run(run), plan.schedule == "sppo_msp"
    problem = multiplexed_problem(run, degrees=degrees) if by_name else None
    if problem is not None:
        raise ValueError(problem)
    if plan.sequence_parallel == "megatron" and plan.sequence_parallel_degree > 1:
        for stage in plan.stages:
            check_whole_classes(stage.subsequences)
    problem = subsequence_problem(
        run, lengths=plan.lengths, degrees=degrees, uses_msp=plan.uses_msp
    )
    if problem is not None:
        raise ValueError(problem)
    if kind == "cuda":
        ranges = msp_ranges(plan.program().msp_groups) if plan.uses_msp else []
        use = CommunicatorUse.of(plan.candidate(), ranges=ranges)
        num_lanes = may_offload(run, plan) + plan.state.leaves_device
        check_streams(mesh_shape(run), use, num_lanes=num_lanes)


# Free memory and disk space


def find_free_memory(job: Job, *, plans_ahead: bool) -> FreeMemory:
    """Return the memory and disk space that is free for the ranks on this machine.

    Args:
        job: Job that trains the run.
        plans_ahead: Each rank has another process that plans its next step.
    """
    device, local_ranks, path = job.device, job.local_ranks, job.run.activations.disk
    available = device.free_bytes(local_ranks=local_ranks)
    host_bytes = device.host_tier_bytes(local_ranks=local_ranks)
    if plans_ahead:
        host_bytes = max(0, host_bytes - PLANNING_PROCESS_BYTES)
        if device.kind == "cpu":
            available = max(0, available - PLANNING_PROCESS_BYTES)
    disk = DiskRoom(free_bytes=0) if path is None else usable_directory(Path(path))
    return FreeMemory(device.kind, available, host_bytes, disk, local_ranks)


def _check_step_size(run: RunConfig, free: FreeMemory) -> None:
    """Raise MemoryError if the data and program of a step alone do not fit; builds neither."""
    parallel, num_subsequences = run.parallel, run.sequence.num_subsequences
    sequences = run.train.sequences_per_step // parallel.data_parallel_degree
    units = sequences * (1 if num_subsequences == "auto" else num_subsequences)
    tokens = sequences * run.sequence.length
    is_pipeline = parallel.pipeline_parallel_degree > 1
    needed = step_bytes(tokens=tokens, units=units, is_pipeline=is_pipeline)
    if needed > free.device_bytes:
        raise MemoryError(
            f"train.sequences_per_step={run.train.sequences_per_step}: the tokens and the program "
            f"of one step take {format_bytes(needed)} on a rank, and "
            f"{format_bytes(free.device_bytes)} are available: lower it"
        )


def check_room(run: RunConfig, plan: ExecutionPlan, free: FreeMemory) -> None:
    """Raise an error if a plan, which may be older than the run, does not fit on this machine.

    Raises:
        ValueError: The plan needs a disk, and the run names none.
        MemoryError: Device memory, a GPU's host memory, or disk space is too small.
    """
    _check_device_room(run, plan, free)
    if free.kind == "cuda":
        _check_tier_room(run, plan, "host", room_bytes=free.host_bytes)
    if run.activations.disk is None and any(_fullest_rank(run, plan, "disk").values()):
        raise ValueError(
            "the plan needs a disk: write activations.disk=DIR, on a fast local disk, and solve "
            "again with it"
        )
    _check_tier_room(run, plan, "disk", room_bytes=free.disk.usable_bytes // free.local_ranks)


def _check_device_room(run: RunConfig, plan: ExecutionPlan, free: FreeMemory) -> None:
    """Raise MemoryError if the memory of the device, or a disk in memory with it, is too small."""
    needed = max(stage.memory.device.total_bytes for stage in plan.stages)
    if free.kind == "cpu":
        needed = max(needed, REPORT_BYTES)
    disk, available = run.activations.disk, free.device_bytes
    if free.kind == "cpu" and disk is not None and is_memory(Path(disk)):
        needed += max(sum(buckets.values()) for buckets in plan.rank_tier_buckets("disk"))
        if needed > available:
            raise MemoryError(
                f"activations.disk={disk} is a file system in memory: with what the plan puts "
                f"there it needs {format_bytes(needed)}, and {format_bytes(available)} are "
                "available; name a directory on a disk"
            )
    if needed > available:
        raise MemoryError(
            f"the plan needs {format_bytes(needed)} for a sequence of {plan.boundaries[-1]} "
            f"tokens, and {format_bytes(available)} are available: end other programs, or solve "
            "again on this machine"
        )


def _check_tier_room(
    run: RunConfig, plan: ExecutionPlan, place: Literal["host", "disk"], *, room_bytes: int
) -> None:
    """Raise MemoryError if what the fullest rank stores in a tier needs more than `room_bytes`."""
    buckets = _fullest_rank(run, plan, place)
    if sum(buckets.values()) > room_bytes:
        raise MemoryError(tier_too_small(run, place=place, buckets=buckets, room_bytes=room_bytes))


def _fullest_rank(
    run: RunConfig, plan: ExecutionPlan, place: Literal["host", "disk"]
) -> Mapping[str, int]:
    """Return the bytes, by bucket, of the rank that stores most in a tier.

    With ``checkpoint.async_save`` the copy of the state that is written in the background counts in
    host memory, too, even if the plan was made without it.
    """
    ranks = plan.rank_tier_buckets(place)
    if place == "host":
        saved = checkpoint_bytes(plan.candidate()) if run.checkpoint.async_save else repeat(0)
        ranks = tuple(
            {**buckets, SAVED_IN_BACKGROUND: copied}
            for buckets, copied in zip(ranks, saved, strict=False)
        )
    return max(ranks, key=lambda buckets: sum(buckets.values()))


def check_first_checkpoint(run: RunConfig) -> None:
    """Raise MemoryError if the disk of the output directory lacks space for a first checkpoint.

    A run that has checkpoints is not checked: its next save removes what a killed save left behind.
    """
    config, directory = run.checkpoint, Path(run.train.output) / CHECKPOINTS_DIRECTORY
    keeps_best = run.validation is not None and run.validation.keep_best
    if not (config.at_end or config.every or keeps_best) or list_checkpoints(directory):
        return
    disk = shutil.disk_usage(next(path for path in directory.absolute().parents if path.is_dir()))
    needed = whole_checkpoint_bytes(run)
    if disk.total and needed > disk.free:  # /proc and the like have no space at all, nor files
        raise MemoryError(
            f"a checkpoint takes {format_bytes(needed)}, and {format_bytes(disk.free)} are free "
            f"for {directory}: free some space, or set train.output to another disk"
        )
