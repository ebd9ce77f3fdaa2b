"""All checks before a run starts, and the plan of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sppo.activations.placement import check_whole_classes
from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, METADATA_FILE, list_checkpoints
from sppo.config import RunConfig
from sppo.config.json_file import read_json
from sppo.data.samples.document_samples import DocumentSamples
from sppo.data.sequences import TrainingData
from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import hardware_for
from sppo.hardware.this_machine import C_HEAP_SHARE, count_cores, divide_cpu, threads_of_rank
from sppo.kernels.native.cpu_allocator import install_cpu_allocator
from sppo.parallel.mesh_shape import MeshShape
from sppo.parallel.stream_budget import StreamUse, check_streams
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.replica_plan import ReplicaPlan, StepRequest, plan_replica
from sppo.planning.elastic.samples_plan import STEPS, plan_samples
from sppo.planning.elastic.step_plan import step_planner
from sppo.planning.plan import ExecutionPlan
from sppo.planning.plan_program import plan_program
from sppo.planning.run_plan import plan_run
from sppo.planning.search.choices import Degrees, multiplexed_problem, subsequence_problem
from sppo.schedule.encoding import encode
from sppo.schedule.msp_groups import find_msp_groups
from sppo.training.checks.input_checks import check_inputs, check_weights
from sppo.training.checks.labels import check_labels
from sppo.training.checks.libraries import load_libraries
from sppo.training.checks.room_checks import (
    Room,
    check_disk,
    check_memory,
    check_step_size,
    find_room,
)
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.device import Device, DeviceKind
from sppo.training.ranks import mesh_shape
from sppo.training.state import may_offload
from sppo.training.steps.corrections import saved_history
from sppo.training.training_data import training_data


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step of samples that a run begins with, or goes on with.

    Attributes:
        number: Counted from 1.
        planned: Of the first replica.
    """

    number: int
    planned: ReplicaPlan


@dataclass(frozen=True, slots=True)
class Preflight:
    """A run whose inputs are known to fit together."""

    data: TrainingData | DocumentSamples
    plan: ExecutionPlan
    """Plan of a step; of a step of the longest samples where steps have samples."""
    next_step: NextStep | None = None
    """The step of samples that is run first; None of sequences, whose steps are alike, and where
    all steps are done."""


def check_before_training(
    run: RunConfig,
    *,
    plan: ExecutionPlan | None = None,
    local_ranks: int = 1,
    device: Device | None = None,
    starts_ranks: bool = False,
) -> Preflight:
    """Open the data, check weights and output, decide what was left to ``auto``.

    Args:
        run: checked.
        plan: to follow instead of deciding here.
        local_ranks: processes of the run on this machine.
        device: that this process computes on; None: the CPU.
        starts_ranks: this process does not train, but starts those that do.

    Raises:
        ValueError: what is wrong, with the rule and the fix; nothing was changed.
        MemoryError: the run does not fit in this machine's memory.
    """
    device = device or CpuDevice()
    check_inputs(run)
    check_weights(run)
    training = training_data(run)
    if isinstance(training, DocumentSamples):
        run = run_of_longest_samples(run, longest=int(training.table.lengths.max()))
    check_labels(training, steps=run.train.steps)
    if device.kind == "cpu":
        load_libraries(tensorboard=run.train.tensorboard)
    room = find_room(
        run,
        device,
        local_ranks=local_ranks,
        starts_ranks=starts_ranks,
        plans_ahead=isinstance(training, DocumentSamples) and run.planning.ahead,
    )
    if device.kind == "cpu":
        check_step_size(run, room)
    if plan is None:
        hardware = _as_used(run, device, local_ranks=local_ranks)
        if device.kind == "cuda":  # what no plan may use is not free either
            room = replace(room, device_bytes=min(room.device_bytes, hardware.device.usable_bytes))
        plan = _planned(run, training, hardware=hardware, room=room)
    check_trainable(run, plan, kind=device.kind)
    check_memory(run, plan, room)
    check_disk(run, plan, room)
    return Preflight(training, plan, _next_step(run, training, plan))


def _planned(
    run: RunConfig,
    training: TrainingData | DocumentSamples,
    *,
    hardware: HardwareSpec,
    room: Room,
) -> ExecutionPlan:
    """Return the plan of a run's steps; of samples, judged by its first ones."""
    limits: dict[str, Any] = {
        "hardware": hardware,
        "available_bytes": room.device_bytes,
        "disk_bytes": room.disk.usable_bytes,  # the plan divides it
        "host_bytes": room.host_bytes,
    }
    if not isinstance(training, DocumentSamples):
        return plan_run(run, **limits)
    return plan_samples(run, steps=tuple(_first_steps(training)), **limits)


def _first_steps(training: DocumentSamples) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each sample of a run's first steps, also of one that goes on later.

    So it goes on with the stages that it began with, bit for bit.
    """
    consumed = 0
    for _ in range(STEPS):
        samples = training.step_samples(consumed)
        consumed += len(samples)
        yield training.lengths(samples)


def _next_step(
    run: RunConfig, training: TrainingData | DocumentSamples, plan: ExecutionPlan
) -> NextStep | None:
    """Return the plan of the step that a run begins or goes on with, where steps differ.

    That of the newest checkpoint as it lies there: whether it is whole shows when it is loaded.

    Raises:
        MemoryError: it does not fit.
    """
    if not isinstance(training, DocumentSamples):
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
    """Return that of the newest checkpoint; without one that of a run that begins."""
    for _, path in list_checkpoints(Path(run.train.output) / CHECKPOINTS_DIRECTORY):
        with suppress(OSError, ValueError, KeyError, TypeError):
            metadata = read_json(path / METADATA_FILE)
            if type(metadata["step"]) is type(metadata["sequences_consumed"]) is int:
                return dict(metadata)
    return {"step": 0, "sequences_consumed": 0}


def _as_used(run: RunConfig, device: Device, *, local_ranks: int) -> HardwareSpec:
    """The machine that the run names, or this one, as its processes divide it."""
    hardware = hardware_for(run.hardware, this_machine=device.machine())
    if device.kind == "cpu":
        hardware = _with_heap(hardware)
        if not hardware.device.gemm_points:
            return divide_cpu(hardware, local_ranks)
        threads, cores = threads_of_rank(local_ranks), count_cores()
        return divide_cpu(hardware, local_ranks, threads=threads, cores=cores)
    node = replace(hardware.node, num_devices=local_ranks)
    num_nodes = max(1, MeshShape.of(run.parallel).num_ranks // local_ranks)
    return replace(hardware, node=node, num_nodes=num_nodes)


def check_trainable(run: RunConfig, plan: ExecutionPlan, *, kind: DeviceKind) -> None:
    """Refuse what a plan may hold, and training cannot do; the solver recommends none of it.

    Args:
        run: with the degrees of the plan.
        plan: to follow.
        kind: of the devices.

    Raises:
        ValueError: the rule that it breaks, and what to write.
    """
    degrees, by_name = Degrees.of_run(run), plan.schedule == "sppo_msp"
    problem = multiplexed_problem(run, degrees=degrees) if by_name else None
    if problem is not None:
        raise ValueError(problem)
    if plan.sequence_parallel == "megatron" and plan.sequence_parallel_degree > 1:
        for stage in plan.stages:
            check_whole_classes(stage.subsequences)
    problem = subsequence_problem(
        run, lengths=plan.lengths, degrees=degrees, shares_units=plan.shares_units
    )
    if problem is not None:
        raise ValueError(problem)
    if kind == "cuda":
        check_streams(mesh_shape(run), _stream_use(run, plan))


def _stream_use(run: RunConfig, plan: ExecutionPlan) -> StreamUse:
    """Return what takes CUDA streams in a run."""
    ranges: set[tuple[int, int]] = set()
    if plan.shares_units:
        schedule = plan_program(plan)
        groups = find_msp_groups(schedule, programs=encode(schedule)).values()
        ranges = {(group.ranks[0], group.ranks[-1]) for group in groups}
    return StreamUse(
        ranges=sorted(ranges),
        wraps=plan.virtual_stages > 1,
        ties_ends=run.model.tie_embeddings,
        gathers_weights=plan.zero == 3,
        offloads=may_offload(run, plan),
        offloads_state=plan.state_tiers.leaves_device,
    )


def _with_heap(hardware: HardwareSpec) -> HardwareSpec:
    """The machine as this process uses its memory: without the pool, the C heap has holes."""
    if hardware.device.kind != "cpu" or install_cpu_allocator() is not None:
        return hardware
    return replace(hardware, device=replace(hardware.device, heap_share=C_HEAP_SHARE))
