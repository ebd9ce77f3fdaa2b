"""All checks before the first step of a run, and the plan of its steps.

Rank 0 checks the run and makes its plan for all ranks. Every rank opens the data and checks the
memory, the disk and the attention of its own machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sppo.activations.subsequence_placement import check_whole_classes
from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, METADATA_FILE, list_checkpoints
from sppo.config import RunConfig
from sppo.config.json_file import read_json
from sppo.data.sample_rows import TrainingData
from sppo.hardware.description import DeviceKind, HardwareSpec
from sppo.parallel.mesh_shape import MeshShape
from sppo.parallel.stream_budget import StreamUse, check_streams
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.replica_plan import ReplicaPlan, StepRequest, plan_replica
from sppo.planning.elastic.samples_plan import STEPS, plan_samples
from sppo.planning.elastic.step_plan import step_planner
from sppo.planning.plan import ExecutionPlan
from sppo.planning.run_plan import plan_run
from sppo.planning.search.choices import Degrees, multiplexed_problem, subsequence_problem
from sppo.schedule.msp_groups import msp_ranges
from sppo.training.checks.attention_in_use import (
    AttentionInUse,
    check_attention,
    load_attention,
    with_attention_here,
)
from sppo.training.checks.input_checks import check_inputs, check_weights
from sppo.training.checks.room_checks import (
    FreeMemory,
    check_disk,
    check_first_checkpoint,
    check_memory,
    check_step_size,
    find_free_memory,
    load_libraries,
)
from sppo.training.devices.choose_device import machine_of_ranks
from sppo.training.devices.device import Device
from sppo.training.job import Job, mesh_shape
from sppo.training.state import may_offload
from sppo.training.steps.corrections import saved_history
from sppo.training.training_data import check_labels, input_facts, training_data


@dataclass(frozen=True, slots=True)
class NextStep:
    """First step of samples that a run, new or resumed, will execute.

    Attributes:
        number: Number of the step, counted from 1.
        planned: Plan of the step for the first replica.
    """

    number: int
    planned: ReplicaPlan


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """Training data and plan of a run that passed all checks."""

    data: TrainingData
    plan: ExecutionPlan
    """Plan of every step; in a run of samples, of a step of the longest samples."""
    attention: AttentionInUse
    """Attention back ends of the plan and of this machine."""
    next_step: NextStep | None = None
    """First step of samples; None if all steps are done, or in a run of sequences, whose steps are
    alike."""


def preflight(
    job: Job, plan: ExecutionPlan | None = None, *, checks_inputs: bool = False
) -> CheckedRun:
    """Check that a run can be trained here, and make its plan unless one is given. Collective.

    An error of any rank is raised on all ranks, before anything is changed.

    Args:
        job: Job that trains the run.
        plan: Plan to follow; None to make one.
        checks_inputs: Rank 0 also makes the checks of
            :func:`sppo.training.checks.input_checks.check_inputs`, which otherwise the process
            made that the user started.

    Raises:
        ValueError: An input or the plan breaks a rule; names the rule and the fix.
        MemoryError: The run does not fit in the memory of a rank.
    """
    run, ranks, device = job.run, job.ranks, job.device
    if checks_inputs:
        ranks.decided_by_main(lambda: check_inputs(run))
    ranks.decided_by_main(lambda: check_weights(run))
    training = ranks.done_by_all(lambda: training_data(run))
    ranks.check_same_facts(lambda: input_facts(run, training.data))
    ranks.decided_by_main(lambda: check_labels(training, steps=run.train.steps))
    if run.data.samples == "documents":
        run = run_of_longest_samples(run, longest=int(training.table.lengths.max()))
    if device.kind == "cpu":
        load_libraries(tensorboard=run.train.tensorboard)
    load_attention(run, device)
    ranks.peers.barrier()  # free memory is meaningful once every rank has loaded its libraries
    free = find_free_memory(
        run,
        device,
        local_ranks=ranks.local_ranks,
        plans_ahead=run.data.samples == "documents" and run.planning.ahead,
    )
    plan = ranks.decided_by_main(lambda: _trainable_plan(job, run, plan, training, free=free))
    # Every rank has read the free memory by now, and none has allocated any.
    attention = ranks.done_by_all(lambda: _check_fits(run, plan, device, free=free))
    ranks.decided_by_main(lambda: check_first_checkpoint(run))
    next_step = ranks.decided_by_main(lambda: _next_step(run, training, plan))
    return CheckedRun(training, plan, attention, next_step)


def _trainable_plan(
    job: Job,
    run: RunConfig,
    plan: ExecutionPlan | None,
    training: TrainingData,
    *,
    free: FreeMemory,
) -> ExecutionPlan:
    """Return the plan of a run, made for the free memory unless one is given.

    Args:
        job: Job that trains the run.
        run: Run configuration; in a run of samples, with the length of the longest sample.
        plan: Plan to follow; None to make one.
        training: Training data of the run.
        free: Free memory of this machine.

    Raises:
        ValueError: Training does not support the plan, or no plan is possible.
        MemoryError: A step does not fit.
    """
    device = job.device
    if device.kind == "cpu":
        check_step_size(run, free)
    if plan is None:
        num_ranks, local_ranks = MeshShape.of(run.parallel).num_ranks, job.ranks.local_ranks
        hardware = machine_of_ranks(run, device, num_ranks=num_ranks, local_ranks=local_ranks)
        hardware = with_attention_here(hardware, run, device)
        if device.kind == "cuda":  # a plan uses at most the usable memory
            free = replace(free, device_bytes=min(free.device_bytes, hardware.device.usable_bytes))
        plan = _planned(run, training, hardware=hardware, free=free)
    check_trainable(run, plan, kind=device.kind)
    return plan


def _planned(
    run: RunConfig,
    training: TrainingData,
    *,
    hardware: HardwareSpec,
    free: FreeMemory,
) -> ExecutionPlan:
    """Make the plan of a run's steps; steps of samples are planned for the first few of them."""
    limits: dict[str, Any] = {
        "hardware": hardware,
        "available_bytes": free.device_bytes,
        "disk_bytes": free.disk.usable_bytes,  # of all ranks; the plan divides it
        "host_bytes": free.host_bytes,
    }
    if run.data.samples == "stream":
        return plan_run(run, **limits)
    return plan_samples(run, steps=tuple(_first_steps(training)), **limits)


def _check_fits(
    run: RunConfig, plan: ExecutionPlan, device: Device, *, free: FreeMemory
) -> AttentionInUse:
    """Check that a plan fits into the memory and the disk of this rank; return its attention."""
    attention = check_attention(run, plan, device)
    check_memory(run, plan, free)
    check_disk(run, plan, free)
    return attention


def _first_steps(training: TrainingData) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of the samples of each of a run's first steps, in tokens.

    A resumed run uses these steps, too, so it gets the same stages and continues bit for bit.
    """
    consumed = 0
    for _ in range(STEPS):
        samples = training.step_samples(consumed)
        consumed += len(samples)
        yield training.lengths(samples)


def _next_step(run: RunConfig, training: TrainingData, plan: ExecutionPlan) -> NextStep | None:
    """Return the plan of the first step of samples to execute, after the newest checkpoint if any.

    The checkpoint is not verified here, but when it is loaded. Returns None in a run of sequences,
    and if all steps are done.

    Raises:
        MemoryError: The step does not fit.
    """
    if run.data.samples == "stream":
        return None
    metadata = _newest_metadata(run)
    done, consumed = int(metadata["step"]), int(metadata["sequences_consumed"])
    if done >= run.train.steps:
        return None
    request = StepRequest(
        training.lengths(training.step_samples(consumed)),
        saved_history(metadata, plan=plan).previous,
        corrects_plan=run.planning.corrected,
    )
    planner = step_planner(plan, background_saves=run.checkpoint.async_save)
    return NextStep(done + 1, plan_replica(planner, request, replica=0))


def _newest_metadata(run: RunConfig) -> Mapping[str, Any]:
    """Return the metadata of the newest checkpoint, or of a new run if there is none."""
    for _, path in list_checkpoints(Path(run.train.output) / CHECKPOINTS_DIRECTORY):
        with suppress(OSError, ValueError, KeyError, TypeError):
            metadata = read_json(path / METADATA_FILE)
            if type(metadata["step"]) is type(metadata["sequences_consumed"]) is int:
                return dict(metadata)
    return {"step": 0, "sequences_consumed": 0}


def check_trainable(run: RunConfig, plan: ExecutionPlan, *, kind: DeviceKind) -> None:
    """Raise ValueError if training does not support a plan; the solver recommends no such plan.

    Args:
        run: Run configuration with the degrees of the plan.
        plan: Plan to follow.
        kind: Kind of the devices.

    Raises:
        ValueError: The plan breaks a rule; names the rule and the fix.
    """
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
        check_streams(mesh_shape(run), _stream_use(run, plan))


def _stream_use(run: RunConfig, plan: ExecutionPlan) -> StreamUse:
    """Return the features of a run that need CUDA streams."""
    ranges: list[tuple[int, int]] = []
    if plan.uses_msp:
        ranges = msp_ranges(plan.program().msp_groups)
    return StreamUse(
        ranges=ranges,
        cuts_units=plan.uses_msp,
        wraps=plan.virtual_stages > 1,
        ties_ends=run.model.tie_embeddings,
        gathers_weights=plan.zero == 3,
        offloads=may_offload(run, plan),
        offloads_state=plan.state.leaves_device,
    )
