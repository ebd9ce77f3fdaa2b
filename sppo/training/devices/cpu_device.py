"""The CPU as the device of a rank.

Its device memory is the machine's memory, work is done when the issuing call returns, and offloaded
tensors go to a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sppo.engine.trace import Stopwatch
from sppo.engine.unit import SequenceData
from sppo.hardware.description import DeviceKind, HardwareSpec
from sppo.hardware.this_machine import describe_cpu, usable_memory_bytes
from sppo.kernels.native.cpu_allocator import install_cpu_allocator
from sppo.kernels.native.machine_memory import memory_room
from sppo.kernels.native.process_memory import (
    file_bytes,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
)
from sppo.offload.block_store import BlockStore
from sppo.offload.lane import Lane, MappedFileLane
from sppo.offload.state_memory import StateMemory
from sppo.parallel.job.environment import RankEnvironment
from sppo.planning.plan import ExecutionPlan
from sppo.units import counted


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Memory that tensors use in the pool of the device's allocator."""

    used_bytes: int
    """Bytes used now."""
    used_peak_bytes: int
    """Peak of the bytes used since the device reset it."""
    resident_peak_bytes: int | None = None
    """Peak of the bytes that the pool has from the system, used or free; None if unknown."""


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The CPU, with the machine's memory.

    Attributes:
        kind: Kind of device, in the terms of hardware descriptions.
        torch_device: Torch device on which tensors live.
        group_device: Device whose tensors NCCL sends between ranks; None if gloo sends tensors.
    """

    kind: DeviceKind = "cpu"
    torch_device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    group_device: torch.device | None = None

    def begin(self, environment: RankEnvironment | None = None) -> None:
        """Install the memory pool of CPU tensors, which can return freed memory to the system.

        A second call does nothing more.

        Args:
            environment: Place of this process in its job, at the first call; None if it is alone.
        """
        install_cpu_allocator()

    def describe(self) -> str:
        """Return the number of threads, e.g. ``cpu with 2 threads``."""
        return f"cpu with {counted(torch.get_num_threads(), 'thread')}"

    def machine(self) -> HardwareSpec:
        """Return the description of this machine's CPU and usable memory."""
        return describe_cpu(usable_memory_bytes())

    def free_bytes(self, *, local_ranks: int) -> int:
        """Return this rank's equal share of the free memory, in bytes.

        Args:
            local_ranks: Number of processes of the run on this machine.
        """
        return memory_room().share_bytes(local_ranks)

    def host_tier_bytes(self, *, local_ranks: int) -> int:
        """Return 0: the device memory of a CPU is the host's memory."""
        return 0

    def capacity_bytes(self, *, baseline_bytes: int) -> int:
        """Return all memory that this process may use, ``baseline_bytes`` included."""
        return memory_room().least_bytes + baseline_bytes

    def peak_flops_per_s(self, dtype: torch.dtype) -> float | None:
        """Return None: other programs share a CPU, and what is left to this one varies."""
        return None

    def held_bytes(self) -> int:
        """Return the resident set in bytes."""
        return resident_bytes()

    def reset_peak(self) -> None:
        """Reset the recorded peaks of the resident set and of the pool."""
        reset_peak()
        allocator = install_cpu_allocator()
        if allocator is not None:
            allocator.reset_peak()

    def peak_bytes(self) -> int:
        """Return the peak of the resident set in bytes."""
        return peak_resident_bytes()

    def file_bytes(self) -> int:
        """Return the resident pages of libraries and other files in bytes."""
        return file_bytes()

    def pool(self) -> PoolUse | None:
        """Return the memory that tensors use in the pool; None with torch's own allocator."""
        allocator = install_cpu_allocator()
        if allocator is None:
            return None
        memory = allocator.memory()
        return PoolUse(memory.used_bytes, memory.used_peak_bytes, memory.resident_peak_bytes)

    def trim(self) -> None:
        """Return the unused pages of the pool to the system."""
        allocator = install_cpu_allocator()
        if allocator is not None:
            allocator.trim()

    def put(self, sequence: SequenceData) -> SequenceData:
        """Return ``sequence`` itself, which is on the device already."""
        return sequence

    def synchronize(self) -> None:
        """Return immediately: work on a CPU is done when the issuing call returns."""

    def wait_with_timeout(self, marks: Sequence[Any], *, stall_timeout_s: float) -> bool:
        """Return True: work on a CPU is done when the issuing call returns."""
        return True

    def stopwatch(self) -> Stopwatch:
        """Return a stopwatch that reads the host's clock."""
        return Stopwatch()

    def state_lane(
        self, memory: StateMemory | None, *, failed_step_timeout_s: float | None
    ) -> Lane:
        """Return the lane of training state to and from a file.

        Args:
            memory: Memory of the state in a file.
            failed_step_timeout_s: Has no effect: threads never wait for another rank.
        """
        assert memory is not None, "host memory is the device's own"
        return MappedFileLane(memory.drop_pages)

    def block_store(
        self,
        plan: ExecutionPlan,
        *,
        disk: Path | None,
        debug: bool,
        failed_step_timeout_s: float | None,
    ) -> BlockStore:
        """Return a store that offloads to a disk."""
        assert disk is not None, "checked before training"
        # Compute waits for each copy out. If it ran ahead where the disk is slow and no slot is
        # free, it would hold the offloaded tensors of one layer more than planned.
        return BlockStore(Lane(), disk=disk, source_lag=0, debug=debug)
