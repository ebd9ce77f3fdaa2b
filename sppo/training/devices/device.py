"""Interface of a device: the operations of training that differ between a CPU and a GPU.

The trainer calls this interface instead of testing the kind of device. Implementations are
:mod:`sppo.training.devices.cpu_device` and :mod:`sppo.training.devices.cuda_device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from sppo.engine.trace import Stopwatch
from sppo.engine.unit import SequenceData
from sppo.hardware.description import HardwareSpec
from sppo.offload.offload_store import OffloadStore
from sppo.offload.state_memory import StateMemory
from sppo.offload.transfers import Transfers
from sppo.parallel.job.environment import RankEnvironment
from sppo.planning.plan import ExecutionPlan

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Memory that tensors use in the pool of the device's allocator."""

    used_bytes: int
    """Bytes used now."""
    used_peak_bytes: int
    """Peak of the bytes used since :meth:`Device.reset_peak`."""
    resident_peak_bytes: int | None = None
    """Peak of the bytes that the pool has from the system, used or free; None if unknown."""


class Device(Protocol):
    """Device of one rank."""

    @property
    def kind(self) -> DeviceKind:
        """Kind of device, in the terms of hardware descriptions."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """The torch device on which tensors live."""
        ...

    @property
    def group_device(self) -> torch.device | None:
        """Device whose tensors NCCL sends between ranks; None if gloo sends tensors."""
        ...

    def begin(self, environment: RankEnvironment | None = None) -> None:
        """Prepare the device before any tensor is allocated; a second call does nothing more.

        Args:
            environment: Place of this process in its job, at the first call; None if it is alone.
        """
        ...

    def describe(self) -> str:
        """Return a description of the device for messages, e.g. ``cpu with 2 threads``."""
        ...

    def describe_memory(self) -> str:
        """Return a description of the allocator of tensors, for the log."""
        ...

    def machine(self) -> HardwareSpec:
        """Return the description of this machine, for a run file that names no hardware."""
        ...

    def free_bytes(self, *, local_ranks: int) -> int:
        """Return the device memory that this rank may still allocate, in bytes.

        Args:
            local_ranks: Number of processes of the run on this machine.
        """
        ...

    def describe_free_memory(self) -> str:
        """Return a description of the free device memory, for messages."""
        ...

    def host_tier_bytes(self, *, local_ranks: int) -> int:
        """Return the bytes of host memory that this rank may use as a tier; 0 on a CPU."""
        ...

    def capacity_bytes(self, *, baseline_bytes: int) -> int:
        """Return all device memory that this process may use, in bytes.

        Args:
            baseline_bytes: Bytes that the process holds already, which the result includes.
        """
        ...

    def peak_flops_per_s(self, dtype: torch.dtype) -> float | None:
        """Measure matrix products now, and return their FLOPs per second; None on a CPU."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes that the process holds on the device now."""
        ...

    def reset_peak(self) -> None:
        """Reset the recorded peaks of memory."""
        ...

    def peak_bytes(self) -> int:
        """Return the peak of the bytes held since :meth:`reset_peak`."""
        ...

    def file_bytes(self) -> int:
        """Return the part of :meth:`held_bytes` that is pages of files; 0 on a GPU."""
        ...

    def pool(self) -> PoolUse | None:
        """Return the memory that tensors use; None if the allocator does not count it."""
        ...

    def trim(self) -> None:
        """Return memory that no tensor uses to the system."""
        ...

    def put(self, sequence: SequenceData) -> SequenceData:
        """Copy ``sequence`` to the device, perhaps asynchronously."""
        ...

    def synchronize(self) -> None:
        """Wait until all compute issued so far is done."""
        ...

    def wait_with_timeout(self, marks: Sequence[Any], *, stall_timeout_s: float) -> bool:
        """Wait for all compute issued so far; return False if it no longer makes progress.

        Args:
            marks: Marks of the stopwatch, in the order in which compute reaches them.
            stall_timeout_s: Longest time in seconds in which compute may reach no mark.

        Raises:
            RuntimeError: The device has failed.
        """
        ...

    def stopwatch(self) -> Stopwatch:
        """Return a stopwatch for the actions of a step."""
        ...

    def transfers(
        self, memory: StateMemory | None, *, failed_step_timeout_s: float | None
    ) -> Transfers:
        """Return the copies of training state between this device and the tier behind it.

        Args:
            memory: Memory of the state in a file; None for a tier in host memory.
            failed_step_timeout_s: Longest time in seconds to wait for the copies of a failed step;
                None for no limit.
        """
        ...

    def offload_stores(
        self,
        plan: ExecutionPlan,
        *,
        count: int,
        disk: Path | None,
        debug: bool,
        failed_step_timeout_s: float | None,
    ) -> list[OffloadStore]:
        """Return stores for the offloaded tensors of a plan.

        Args:
            plan: Plan of the run.
            count: Number of stores to return; 0 if nothing is offloaded.
            disk: Directory of a disk tier; None without one.
            debug: Verify checksums of the copies back, and overwrite each slot after its use.
            failed_step_timeout_s: Longest time in seconds to wait for the copies of a failed step;
                None for no limit.
        """
        ...
