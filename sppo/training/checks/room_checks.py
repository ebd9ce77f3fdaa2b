"""Checks that a run and its plan fit in the free memory and disk space of this machine."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Literal

from sppo.checkpoint.files import CHECKPOINTS_DIRECTORY, list_checkpoints
from sppo.config import RunConfig
from sppo.cost.layer import ACCUMULATION_BYTES
from sppo.cost.memory.process_growth import PLANNING_PROCESS_BYTES, REPORT_BYTES, step_bytes
from sppo.cost.memory.stage_memory import checkpoint_bytes
from sppo.cost.memory.tier_memory import SAVED_IN_BACKGROUND
from sppo.cost.parameters import num_parameters
from sppo.hardware.description import DeviceKind
from sppo.offload.disk.disk_room import DiskRoom, is_memory, usable_directory
from sppo.planning.plan import ExecutionPlan
from sppo.planning.too_large import tier_too_small
from sppo.training.devices.device import Device
from sppo.units import format_bytes


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free memory and disk space of this machine.

    Attributes:
        kind: Kind of the device.
        device_bytes: Free memory of the device, for one rank.
        host_bytes: Free host memory behind a GPU, for one rank; 0 on a CPU, whose device memory is
            the host's.
        disk: Disk space of the disk tier, for all ranks.
        local_ranks: Number of ranks on this machine.
    """

    kind: DeviceKind
    device_bytes: int
    host_bytes: int
    disk: DiskRoom
    local_ranks: int


@cache
def load_libraries(*, tensorboard: bool = False) -> None:
    """Import the plotting libraries, which a run uses at its end, before free memory is measured.

    They take tens of MiB. In a small container a plan that did not account for them would have the
    run killed after its last step.

    Args:
        tensorboard: Also import the writer of TensorBoard's event files.
    """
    from matplotlib.backends import backend_agg  # noqa: F401

    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401


def find_free_memory(
    run: RunConfig, device: Device, *, local_ranks: int, plans_ahead: bool
) -> FreeMemory:
    """Return the memory and disk space that is free for the ranks on this machine.

    Args:
        run: Validated run configuration.
        device: Device of this process.
        local_ranks: Number of processes of the run on this machine.
        plans_ahead: Each rank has another process that plans its next step.
    """
    available = device.free_bytes(local_ranks=local_ranks)
    host_bytes = device.host_tier_bytes(local_ranks=local_ranks)
    if plans_ahead:
        host_bytes = max(0, host_bytes - PLANNING_PROCESS_BYTES)
        if device.kind == "cpu":
            available = max(0, available - PLANNING_PROCESS_BYTES)
    path = run.activations.disk
    disk = DiskRoom(free_bytes=0) if path is None else usable_directory(Path(path))
    return FreeMemory(device.kind, available, host_bytes, disk, local_ranks)


def check_step_size(run: RunConfig, free: FreeMemory) -> None:
    """Raise MemoryError if the data and program of a step alone do not fit; builds neither.

    Args:
        run: Validated run configuration.
        free: Free memory of this machine.
    """
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


def check_memory(run: RunConfig, plan: ExecutionPlan, free: FreeMemory) -> None:
    """Raise MemoryError if the plan does not fit in device memory, or a GPU's host memory."""
    memory = max((stage.memory for stage in plan.stages), key=lambda m: m.device.total_bytes)
    needed = memory.device.total_bytes
    if free.kind == "cpu":
        needed = max(needed, REPORT_BYTES)
    disk, available = run.activations.disk, free.device_bytes
    if free.kind == "cpu" and disk is not None and is_memory(Path(disk)):
        needed += max(sum(buckets.values()) for buckets in plan.rank_tier_buckets("disk"))
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
    if free.kind == "cuda":
        _check_host(run, plan, free.host_bytes)


def _check_host(run: RunConfig, plan: ExecutionPlan, host_bytes: int) -> None:
    """Raise MemoryError if the host tier, or the slots of a disk tier, do not fit in host memory.

    With ``checkpoint.async_save`` the copy of the state that is written in the background counts,
    too, even if the plan was made without it.
    """
    saved = checkpoint_bytes(plan.candidate()) if run.checkpoint.async_save else repeat(0)
    ranks = [
        {**buckets, SAVED_IN_BACKGROUND: copied}
        for buckets, copied in zip(plan.rank_tier_buckets("host"), saved, strict=False)
    ]
    fullest = max(ranks, key=lambda buckets: sum(buckets.values()))
    _check_tier(run, plan, "host", buckets=fullest, room_bytes=host_bytes)


def check_disk(run: RunConfig, plan: ExecutionPlan, free: FreeMemory) -> None:
    """Raise an error if the plan, which may be older than the run, does not fit on the disk.

    Raises:
        ValueError: The plan needs a disk, and the run names none.
        MemoryError: The disk space, or the limit on the size of a file, is too small.
    """
    fullest = max(plan.rank_tier_buckets("disk"), key=lambda buckets: sum(buckets.values()))
    needed = sum(fullest.values())
    if not needed:
        return
    if run.activations.disk is None:
        raise ValueError(
            "the plan needs a disk: write activations.disk=DIR, on a fast local "
            "disk, and solve again with it"
        )
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if resource.RLIM_INFINITY != largest < needed:
        raise MemoryError(
            f"the plan puts {format_bytes(needed)} on activations.disk={run.activations.disk}, "
            f"and this process may write files of {format_bytes(largest)} at most: raise that "
            "limit (ulimit -f), or offload less"
        )
    room_bytes = free.disk.usable_bytes // free.local_ranks
    _check_tier(run, plan, "disk", buckets=fullest, room_bytes=room_bytes)


def _check_tier(
    run: RunConfig,
    plan: ExecutionPlan,
    place: Literal["host", "disk"],
    *,
    buckets: Mapping[str, int],
    room_bytes: int,
) -> None:
    """Raise MemoryError if a rank stores more bytes in a tier, by bucket, than there is room."""
    if sum(buckets.values()) > room_bytes:
        raise MemoryError(
            tier_too_small(
                run,
                plan.candidate(),
                plan.placement(),
                place=place,
                buckets=buckets,
                room_bytes=room_bytes,
            )
        )


def check_first_checkpoint(run: RunConfig) -> None:
    """Raise MemoryError if the disk of the output directory lacks space for a first checkpoint.

    A run that has checkpoints is not checked: its next save removes what a killed save left behind.
    """
    config, directory = run.checkpoint, Path(run.train.output) / CHECKPOINTS_DIRECTORY
    saves = config.at_end or config.every not in ("auto", 0)
    if not saves or list_checkpoints(directory):
        return
    disk = shutil.disk_usage(next(path for path in directory.absolute().parents if path.is_dir()))
    needed = 3 * ACCUMULATION_BYTES * num_parameters(run.model)  # weights and both moments
    if disk.total and needed > disk.free:  # /proc and the like have no space at all, nor files
        raise MemoryError(
            f"a checkpoint takes {format_bytes(needed)}, and {format_bytes(disk.free)} are free "
            f"for {directory}: free some space, or set train.output to another disk"
        )
