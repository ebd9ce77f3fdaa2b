"""Everything that can be found wrong before a run starts, and what it will do."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sppo.activations.placement import check_whole_classes
from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, METADATA_FILE, list_checkpoints
from sppo.config import RunConfig
from sppo.config.json_file import read_json
from sppo.cost.kv import offloaded_kv_bytes
from sppo.cost.memory.process_growth import PLANNING_PROCESS_BYTES, REPORT_BYTES, step_bytes
from sppo.data.samples import DocumentSamples
from sppo.data.sequences import TrainingData
from sppo.hardware.description import HardwareSpec
from sppo.hardware.file import hardware_for
from sppo.hardware.this_machine import (
    C_HEAP_SHARE,
    count_cores,
    divide_cpu,
    threads_of_rank,
)
from sppo.kernels.native.cpu_allocator import install_cpu_allocator
from sppo.kernels.native.process_memory import private_bytes
from sppo.offload.disk import DiskRoom, is_memory, usable_directory
from sppo.parallel.mesh_shape import MeshShape
from sppo.parallel.stream_budget import StreamUse, check_streams
from sppo.planning.elastic.longest_samples import run_of_longest_samples
from sppo.planning.elastic.replica_plan import ReplicaPlan, StepRequest, plan_replica
from sppo.planning.elastic.samples_plan import STEPS, plan_samples
from sppo.planning.elastic.step_plan import step_planner
from sppo.planning.plan import ExecutionPlan, check_plan_fits, read_plan
from sppo.planning.plan_program import check_program, plan_candidate, plan_program
from sppo.planning.run_plan import offload_less, plan_run
from sppo.schedule.encoding import encode
from sppo.schedule.msp_groups import find_msp_groups
from sppo.training.checks.input_checks import check_inputs
from sppo.training.checks.libraries import load_libraries
from sppo.training.devices.cpu_device import CpuDevice
from sppo.training.devices.device import Device, Kind
from sppo.training.ranks import mesh_shape
from sppo.training.state import may_offload
from sppo.training.steps.corrections import saved_history
from sppo.training.training_data import training_data
from sppo.units import format_bytes


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
    """Of its steps; of samples, of a step of the longest ones."""
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
    training = training_data(run)
    if isinstance(training, DocumentSamples):
        run = run_of_longest_samples(run, longest=int(training.table.lengths.max()))
    _check_labels(training, steps=run.train.steps)
    if device.kind == "cpu":
        load_libraries(tensorboard=run.train.tensorboard)
    available, disk = device.room_bytes(local_ranks=local_ranks), _disk_room(run)
    if starts_ranks and device.kind == "cpu":  # each loads what this process has loaded
        available = max(0, available - private_bytes())
    host_bytes = device.host_room_bytes(local_ranks=local_ranks)
    if isinstance(training, DocumentSamples) and run.planning.ahead:
        host_bytes = max(0, host_bytes - PLANNING_PROCESS_BYTES)
        if device.kind == "cpu":
            available = max(0, available - PLANNING_PROCESS_BYTES)
    if device.kind == "cpu":
        _check_step_size(run, available)
    if plan is None:
        hardware = _as_used(run, device, local_ranks=local_ranks)
        if device.kind == "cuda":  # what no plan may use is not free either
            available = min(available, hardware.device.usable_bytes)
        plan = _planned(
            run,
            training,
            hardware=hardware,
            available_bytes=available,
            disk_bytes=disk.usable_bytes,  # the plan divides it
            host_bytes=host_bytes,
        )
    _check_trainable(run, plan)
    _check_memory(run, plan, available, kind=device.kind)
    if device.kind == "cuda":
        _check_host(plan, host_bytes)
        check_streams(mesh_shape(run), _stream_use(run, plan))
    if plan.uses_tier and plan.tier == "disk":
        _check_disk(run, plan, disk, local_ranks=local_ranks)
    return Preflight(training, plan, _next_step(run, training, plan))


def _planned(
    run: RunConfig, training: TrainingData | DocumentSamples, **room: Any
) -> ExecutionPlan:
    """Return the plan of a run's steps; of samples, judged by its first ones."""
    if not isinstance(training, DocumentSamples):
        return plan_run(run, **room)
    return plan_samples(run, steps=tuple(_first_steps(training)), **room)


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


def _check_labels(training: TrainingData | DocumentSamples, *, steps: int) -> None:
    """Raise ValueError if no step has a label; looks no further than the first that has one."""
    tokens = training.data
    isolates = isinstance(training, TrainingData) and training.isolate_documents
    if tokens.loss_mask is None and not isolates:
        return
    if any(map(training.has_labels, _places_of_steps(training, steps=steps))):
        return
    fix = (
        "Prepare the data again, with a loss mask that is true for what is to be learnt"
        if tokens.loss_mask is not None
        else "Set data.isolate_documents=false, or prepare longer documents"
    )
    raise ValueError(
        f"{training.why_no_labels(0)}, and so it is in every step: there is nothing to learn "
        f"from. {fix}"
    )


def _places_of_steps(training: TrainingData | DocumentSamples, *, steps: int) -> Iterator[int]:
    """Yield where each step of a run begins, for an epoch at most; nothing without any label."""
    if isinstance(training, DocumentSamples):
        position = 0
        for _ in range(steps):
            if position >= training.num_samples:
                return
            yield position
            position += len(training.step_samples(position))
    elif training.data.num_documents < training.data.num_tokens:
        epoch = -(-training.num_sequences // training.sequences_per_step)
        yield from range(min(steps, epoch))


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


def _check_trainable(run: RunConfig, plan: ExecutionPlan) -> None:
    """What a plan may hold, and training cannot do."""
    if plan.sequence_parallel == "megatron" and plan.sequence_parallel_degree > 1:
        if plan.schedule == "sppo_msp":
            raise ValueError(
                "schedule sppo_msp lends whole weights to other pipeline ranks, and with "
                "parallel.sequence_parallel=megatron no rank has them: write ulysses, or another "
                "parallel.schedule"
            )
        for stage in plan.stages:
            check_whole_classes(stage.subsequences)
    if plan.schedule == "sppo_msp" and plan.zero == 3:
        raise ValueError(
            "schedule sppo_msp lends whole weights to other pipeline ranks, and with "
            "parallel.zero=3 no rank has them: write parallel.zero=2, or another parallel.schedule"
        )
    degree, shortest = run.parallel.sequence_parallel_degree, min(plan.lengths)
    shards = 2 * degree * plan.pipeline_parallel_degree  # a shard of one token may be rounded away
    if plan.schedule == "sppo_msp" and shortest < shards:
        raise ValueError(
            f"parallel.multiplexed: the shortest subsequence has {shortest} tokens, too few for "
            f"shards on {plan.pipeline_parallel_degree} pipeline ranks of {degree} sequence-"
            "parallel ranks each; use fewer subsequences, or parallel.multiplexed=off"
        )
    if shortest < degree:
        raise ValueError(
            f"parallel.sequence_parallel_degree {degree}: the shortest subsequence has {shortest} "
            "tokens, and every rank needs one; use fewer subsequences or a lower degree"
        )


def _stream_use(run: RunConfig, plan: ExecutionPlan) -> StreamUse:
    """What takes CUDA streams in a run."""
    ranges: set[tuple[int, int]] = set()
    if plan.schedule == "sppo_msp":
        schedule = plan_program(plan)
        groups = find_msp_groups(schedule, programs=encode(schedule)).values()
        ranges = {(group.ranks[0], group.ranks[-1]) for group in groups}
    return StreamUse(
        ranges=sorted(ranges),
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


def given_plan(
    run: RunConfig, plan_file: Path, *, kind: Kind = "cpu"
) -> tuple[RunConfig, ExecutionPlan]:
    """The plan in ``plan_file``, if it is for this run, and the run with the degrees it chose.

    Raises:
        ValueError: it is no plan; or see :func:`followed_plan`.
    """
    plan = read_plan(plan_file)
    return followed_plan(run, plan, kind=kind, source=str(plan_file)), plan


def followed_plan(run: RunConfig, plan: ExecutionPlan, *, kind: Kind, source: str) -> RunConfig:
    """The run with the degrees of a plan that it can follow.

    Args:
        run: checked.
        plan: of `sppo solve`.
        kind: of the device that the run is trained on.
        source: what errors call the plan.

    Raises:
        ValueError: it is for another run or machine, or this version cannot follow it.
    """
    check_plan_fits(plan, run_of_longest_samples(run))
    check_program(plan)
    planned = plan.hardware
    if planned.device.kind != kind:
        here, hint = (
            ("the CPU", "hardware.preset=laptop-cpu") if kind == "cpu" else ("a GPU", "its preset")
        )
        raise ValueError(
            f"{source} was made for {planned.name}, and this run is trained on {here}: solve "
            f"again with {hint}, or with a hardware.file of this machine, or keep the plan for "
            "sppo simulate"
        )
    chosen = {
        "data_parallel_degree": plan.data_parallel_degree,
        "pipeline_parallel_degree": plan.pipeline_parallel_degree,
        "sequence_parallel_degree": plan.sequence_parallel_degree,
        "sequence_parallel": plan.sequence_parallel,
    }
    return run.model_copy(update={"parallel": run.parallel.model_copy(update=chosen)})


def _check_step_size(run: RunConfig, available: int) -> None:
    """Raise MemoryError where a step's data and program alone do not fit: nothing is built first.

    Args:
        run: checked.
        available: bytes.
    """
    parallel, num_subsequences = run.parallel, run.sequence.num_subsequences
    sequences = run.train.sequences_per_step // parallel.data_parallel_degree
    units = sequences * (1 if num_subsequences == "auto" else num_subsequences)
    tokens = sequences * run.sequence.length
    is_pipeline = parallel.pipeline_parallel_degree > 1
    needed = step_bytes(tokens=tokens, units=units, is_pipeline=is_pipeline)
    if needed > available:
        raise MemoryError(
            f"train.sequences_per_step={run.train.sequences_per_step}: the tokens and the program "
            f"of one step take {format_bytes(needed)} on a rank, and {format_bytes(available)} are "
            "available: lower it"
        )


def _check_memory(run: RunConfig, plan: ExecutionPlan, available: int, *, kind: Kind) -> None:
    memory = max((stage.memory for stage in plan.stages), key=lambda m: m.device.total_bytes)
    needed = memory.device.total_bytes
    if kind == "cpu":
        needed = max(needed, REPORT_BYTES)
    disk = run.activations.disk
    if kind == "cpu" and disk is not None and is_memory(Path(disk)):
        needed += memory.tier_bytes
        if needed > available:
            raise MemoryError(
                f"activations.disk={run.activations.disk} is a file system in memory: with what "
                f"the plan puts there it needs {format_bytes(needed)}, and "
                f"{format_bytes(available)} are available; name a directory on a disk"
            )
    if needed > available:
        raise MemoryError(
            f"the plan needs {format_bytes(needed)} for a sequence of {plan.boundaries[-1]} "
            f"tokens, and {format_bytes(available)} are available: end other programs, or solve "
            "again on this machine"
        )


def _check_host(plan: ExecutionPlan, host_bytes: int) -> None:
    """Check host memory: offloaded tensors, or the slots in front of a disk; training state."""
    offloaded = max(stage.memory.tier_activations_bytes for stage in plan.stages)
    if plan.tier == "disk":
        offloaded = plan.predicted.host_peak_bytes
    state = max(stage.memory.tier_state_bytes for stage in plan.stages)
    if offloaded + state > host_bytes:
        less = _offload_less(plan, room_bytes=host_bytes - state, needed_bytes=offloaded)
        raise MemoryError(
            f"a rank takes {format_bytes(offloaded + state)} of host memory "
            f"({format_bytes(offloaded)} offloaded activations, {format_bytes(state)} training "
            f"state), and {format_bytes(host_bytes)} may be used: {less}, or end other programs"
        )


def _offload_less(plan: ExecutionPlan, *, room_bytes: int, needed_bytes: int) -> str:
    """Say how a rank would offload no more than fits."""
    if not plan.offloads_anything:
        return "keep weights, gradients and optimizer states on the device (the section state)"
    return offload_less(
        room_bytes=max(0, room_bytes),
        needed_bytes=max(1, needed_bytes),
        kv_bytes=offloaded_kv_bytes(plan_candidate(plan)),
        ratio=max(plan.predicted.offload_ratios),
    )


def _disk_room(run: RunConfig) -> DiskRoom:
    """Return the room on the disk that the run names; none if it names none."""
    if run.activations.disk is None:
        return DiskRoom(free_bytes=0)
    return usable_directory(Path(run.activations.disk))


def _check_disk(run: RunConfig, plan: ExecutionPlan, disk: DiskRoom, *, local_ranks: int) -> None:
    """Check the disk: a plan made elsewhere, or before, may offload more than fits now."""
    if run.activations.disk is None:
        raise ValueError(
            "the plan needs a disk: write activations.disk=DIR, on a fast local "
            "disk, and solve again with it"
        )
    needed = max(stage.memory.tier_bytes for stage in plan.stages)
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if resource.RLIM_INFINITY != largest < needed:
        raise MemoryError(
            f"the plan puts {format_bytes(needed)} on activations.disk={run.activations.disk}, "
            f"and this process may write files of {format_bytes(largest)} at most: raise that "
            "limit (ulimit -f), or offload less"
        )
    needed *= local_ranks
    if needed > disk.usable_bytes:
        state = max(stage.memory.tier_state_bytes for stage in plan.stages)
        room, offloaded = disk.usable_bytes // local_ranks - state, needed // local_ranks - state
        less = _offload_less(plan, room_bytes=room, needed_bytes=offloaded)
        raise MemoryError(
            f"the plan puts {format_bytes(needed)} on activations.disk={run.activations.disk}: "
            f"{disk}; {less}, or name a directory on a larger disk"
        )
