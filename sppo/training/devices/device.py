"""Interface of a device: everything in training that a CPU and a GPU do differently.

The trainer asks this object and never which kind it is. A CPU's device memory is the machine's, its
work is done when it is issued, and what is offloaded goes to a disk; of a GPU see
:mod:`sppo.training.devices.cuda_device`.
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
from sppo.planning.plan import ExecutionPlan

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Memory of torch's tensors, of what its allocator manages."""

    used_bytes: int
    """Now."""
    used_peak_bytes: int
    """Most bytes used since :meth:`Device.reset_peak`."""


class Device(Protocol):
    """One rank's device."""

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
        """The device whose tensors NCCL carries between ranks; None: gloo carries them."""
        ...

    def begin(self) -> None:
        """Make it the one this process computes on, before any tensor is. Twice is once."""
        ...

    def describe(self) -> str:
        """Describe the device for people, e.g. ``cpu with 2 threads``."""
        ...

    def describe_memory(self) -> str:
        """Return what manages the memory of tensors, for people."""
        ...

    def machine(self) -> HardwareSpec:
        """Return this machine, for a run file that names none."""
        ...

    def room_bytes(self, *, local_ranks: int) -> int:
        """Device memory that this rank may still take.

        Args:
            local_ranks: processes of the run on this machine.
        """
        ...

    def describe_room(self) -> str:
        """Return how much of the device's memory is free, for people."""
        ...

    def host_room_bytes(self, *, local_ranks: int) -> int:
        """Host memory behind the device that this rank may take; 0 where it is the device's."""
        ...

    def capacity_bytes(self, *, baseline_bytes: int) -> int:
        """All memory there is to this process, what it holds already included."""
        ...

    def peak_flops_per_s(self, dtype: torch.dtype) -> float:
        """Return the rate that matrix products reach, measured now."""
        ...

    def held_bytes(self) -> int:
        """Memory that the process holds on the device now."""
        ...

    def reset_peak(self) -> None:
        """Count peaks from here on."""
        ...

    def peak_bytes(self) -> int:
        """Most memory held since then."""
        ...

    def pool(self) -> PoolUse | None:
        """Return what tensors use of the memory held; None where nobody counts."""
        ...

    def trim(self) -> None:
        """Give memory that no tensor uses back to the system."""
        ...

    def put(self, sequence: SequenceData) -> SequenceData:
        """Return ``sequence`` on the device; may still be on its way there when this returns."""
        ...

    def synchronize(self) -> None:
        """Return when all compute issued so far is done."""
        ...

    def done_in_time(self, marks: Sequence[Any], *, still_s: float) -> bool:
        """Return when all compute issued so far is done, or False when it no longer gets on.

        Args:
            marks: of the stopwatch, in the order in which compute comes to them.
            still_s: longest time in which it may come to none of them.

        Raises:
            RuntimeError: the device has failed.
        """
        ...

    def stopwatch(self) -> Stopwatch:
        """Return a stopwatch for the actions of a step."""
        ...

    def transfers(self, memory: StateMemory | None, *, give_up_s: float | None) -> Transfers:
        """Return the copies of training state between this device and the tier behind it.

        Args:
            memory: where that state lives, in a file; None: in host memory.
            give_up_s: seconds that a step which failed is waited for; None: until it has ended.
        """
        ...

    def offload_stores(
        self,
        plan: ExecutionPlan,
        *,
        count: int,
        disk: Path | None,
        debug: bool,
        give_up_s: float | None,
    ) -> list[OffloadStore]:
        """Return stores for what the plan offloads; none for a plan that offloads nothing.

        Args:
            plan: to follow.
            count: stores of this rank.
            disk: directory of a disk tier.
            debug: verify what comes back.
            give_up_s: seconds that a step which failed is waited for; None: until it has ended.
        """
        ...
