"""A CPU as what a rank computes on.

Its device memory is the machine's, its work is done when it is issued, and offloaded tensors
go to a disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sppo.engine.trace import HostStopwatch, Stopwatch
from sppo.engine.unit import SequenceData
from sppo.hardware.description import HardwareSpec
from sppo.hardware.this_machine import describe_cpu, usable_memory_bytes
from sppo.kernels.native.cpu_allocator import describe_cpu_allocator, install_cpu_allocator
from sppo.kernels.native.machine_memory import memory_room
from sppo.kernels.peak import measure_matmul_flops_per_s
from sppo.offload.offload_store import OffloadStore
from sppo.offload.thread_queues import ThreadQueues
from sppo.offload.tiers import Tier
from sppo.planning.plan import ExecutionPlan
from sppo.train.device import Kind, PoolUse
from sppo.train.process_memory import peak_resident_bytes, reset_peak, resident_bytes


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The CPU, with the machine's memory."""

    kind: Kind = "cpu"
    torch_device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    group_device: torch.device | None = None

    def begin(self) -> None:
        """See :class:`Device`: what is allocated before stays in the C heap."""
        install_cpu_allocator()

    def describe(self) -> str:
        """See :class:`Device`."""
        return f"cpu with {torch.get_num_threads()} threads"

    def describe_memory(self) -> str:
        """See :class:`Device`."""
        return f"memory of tensors: {describe_cpu_allocator()}"

    def machine(self) -> HardwareSpec:
        """See :class:`Device`."""
        return describe_cpu(usable_memory_bytes())

    def room_bytes(self, *, local_ranks: int) -> int:
        """See :class:`Device`."""
        return memory_room().share_bytes(local_ranks)

    def describe_room(self) -> str:
        """See :class:`Device`."""
        return str(memory_room())

    def host_room_bytes(self, *, local_ranks: int) -> int:
        """See :class:`Device`."""
        return 0

    def capacity_bytes(self, *, baseline_bytes: int) -> int:
        """See :class:`Device`."""
        return memory_room().least_bytes + baseline_bytes

    def peak_flops_per_s(self, dtype: torch.dtype) -> float:
        """See :class:`Device`."""
        return measure_matmul_flops_per_s(dtype)

    def held_bytes(self) -> int:
        """See :class:`Device`: the resident set."""
        return resident_bytes()

    def reset_peak(self) -> None:
        """See :class:`Device`."""
        reset_peak()
        allocator = install_cpu_allocator()
        if allocator is not None:
            allocator.reset_peak()

    def peak_bytes(self) -> int:
        """See :class:`Device`."""
        return peak_resident_bytes()

    def pool(self) -> PoolUse | None:
        """See :class:`Device`."""
        allocator = install_cpu_allocator()
        if allocator is None:
            return None
        memory = allocator.memory()
        return PoolUse(memory.used_bytes, memory.used_peak_bytes)

    def trim(self) -> None:
        """See :class:`Device`."""
        allocator = install_cpu_allocator()
        if allocator is not None:
            allocator.trim()

    def put(self, sequence: SequenceData) -> SequenceData:
        """See :class:`Device`."""
        return sequence

    def synchronize(self) -> None:
        """See :class:`Device`: work is done when it is issued."""

    def stopwatch(self) -> Stopwatch:
        """See :class:`Device`."""
        return HostStopwatch()

    def offload_store(
        self, plan: ExecutionPlan, *, disk: Path | None, debug: bool
    ) -> OffloadStore | None:
        """See :class:`Device`; through worker threads to a disk."""
        if not plan.offloads_anything:
            return None
        assert disk is not None, "checked before training"
        # Compute waits for each copy out. Into a free staging slot that is a memory copy, which
        # takes the same cores either way. Where none is free, for the disk is slow, running ahead
        # would hold the moved tensors of one more layer than there is memory planned for.
        queues = ThreadQueues(poison=debug)
        return OffloadStore(queues, tier=Tier("disk", disk), source_lag=0, checksums=debug)
