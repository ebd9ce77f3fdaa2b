"""What a rank computes on: everything in training that a CPU and a GPU do differently.

The trainer asks this object and never which kind it is. A CPU's device memory is the machine's, its
work is done when it is issued, and what moves away goes to a disk; of a GPU see
:mod:`sppo.train.cuda_device`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from sppo.config.run import RunConfig
from sppo.engine.trace import HostStopwatch, Stopwatch
from sppo.engine.unit import SequenceData
from sppo.kernels.cpu_allocator import describe_cpu_allocator, install_cpu_allocator
from sppo.kernels.machine_memory import memory_room
from sppo.kernels.peak import measure_matmul_flops_per_s
from sppo.offload.moving_store import MovingStore
from sppo.offload.thread_queues import ThreadQueues
from sppo.offload.tiers import Tier
from sppo.parallel.environment import RankEnvironment
from sppo.planning.hardware import HardwareSpec
from sppo.planning.hardware_file import hardware_for
from sppo.planning.plan import ExecutionPlan
from sppo.planning.this_machine import describe_cpu, usable_memory_bytes
from sppo.train.process_memory import peak_resident_bytes, reset_peak, resident_bytes

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What torch's tensors take of the memory that its allocator manages."""

    used_bytes: int
    """Now."""
    used_peak_bytes: int
    """At most since :meth:`Device.reset_peak`."""


class Device(Protocol):
    """One rank's device."""

    @property
    def kind(self) -> Kind:
        """As hardware descriptions call it."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        ...

    @property
    def group_device(self) -> torch.device | None:
        """The device whose tensors NCCL carries between ranks; None: gloo carries them."""
        ...

    def begin(self) -> None:
        """Make it the one this process computes on, before any tensor is. Twice is once."""
        ...

    def describe(self) -> str:
        """For people, e.g. ``cpu with 2 threads``."""
        ...

    def describe_memory(self) -> str:
        """What manages its tensors' memory, for people."""
        ...

    def machine(self) -> HardwareSpec:
        """This machine, for a run file that names none."""
        ...

    def room_bytes(self, *, local_ranks: int) -> int:
        """Device memory that this rank may still take.

        Args:
            local_ranks: processes of the run on this machine.
        """
        ...

    def describe_room(self) -> str:
        """What of the device's memory is free, for people."""
        ...

    def host_room_bytes(self, *, local_ranks: int) -> int:
        """Host memory behind the device that this rank may take; 0 where it is the device's."""
        ...

    def capacity_bytes(self, *, baseline_bytes: int) -> int:
        """All memory there is to this process, what it holds already included."""
        ...

    def peak_flops_per_s(self, dtype: torch.dtype) -> float:
        """What matrix products reach, measured now."""
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
        """Of that, what tensors used; None where nobody counts."""
        ...

    def trim(self) -> None:
        """Give memory that no tensor uses back to the system."""
        ...

    def put(self, sequence: SequenceData) -> SequenceData:
        """``sequence`` on the device; may still be on its way there when this returns."""
        ...

    def synchronize(self) -> None:
        """Return when all compute issued so far is done."""
        ...

    def stopwatch(self) -> Stopwatch:
        """For the actions of a step."""
        ...

    def moving_store(
        self, plan: ExecutionPlan, *, disk: Path | None, debug: bool
    ) -> MovingStore | None:
        """Where one stage's moved activations go; None for a plan that moves none.

        Args:
            plan: to follow.
            disk: directory of a disk tier.
            debug: verify what comes back.
        """
        ...


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

    def moving_store(
        self, plan: ExecutionPlan, *, disk: Path | None, debug: bool
    ) -> MovingStore | None:
        """See :class:`Device`; through worker threads to a disk."""
        if not plan.moves_anything:
            return None
        assert disk is not None, "checked before training"
        # Compute waits for each copy out. Into a free staging slot that is a memory copy, which
        # takes the same cores either way. Where none is free, for the disk is slow, running ahead
        # would hold the moved tensors of one more layer than there is memory planned for.
        queues = ThreadQueues(poison=debug)
        return MovingStore(queues, tier=Tier("disk", disk), source_lag=0, checksums=debug)


def device_kind(run: RunConfig) -> Kind:
    """What ``run`` is trained on here: a GPU, unless there is none or it names a CPU."""
    if torch.version.cuda is not None:
        from sppo.train.cuda_device import prepare_cuda

        prepare_cuda()
    return "cuda" if torch.cuda.is_available() and _named_kind(run) != "cpu" else "cpu"


def choose_device(
    run: RunConfig, *, environment: RankEnvironment | None = None, local_ranks: int = 1
) -> Device:
    """The device of one process of ``run``.

    Args:
        run: checked.
        environment: the place of this process; None: it stands alone, or is to start ranks.
        local_ranks: those it is to start.

    Raises:
        ValueError: the run names a GPU and there is none, or more ranks are on this machine than
            GPUs.
    """
    if device_kind(run) == "cpu":
        if _named_kind(run) == "cuda":
            raise ValueError(_no_gpu(run))
        return CpuDevice()
    from sppo.train.cuda_device import CudaDevice

    count, local_rank = torch.cuda.device_count(), 0
    if environment is not None:
        local_rank, local_ranks = environment.local_rank, environment.local_world_size
        # srun may show every task the one GPU that is its own.
        if environment.launcher == "slurm" and count == 1:
            local_rank, local_ranks = 0, 1
    if local_ranks > count:
        raise ValueError(
            f"{local_ranks} ranks on this machine, {count} GPU{'' if count == 1 else 's'}: every "
            "rank needs one of its own; lower the degrees of parallelism, start ranks on more "
            "machines (torchrun, srun), or write hardware.preset=laptop-cpu to train on the CPU"
        )
    starts_others = environment is None and local_ranks > 1
    return CudaDevice(torch.device("cuda", local_rank), is_own=not starts_others)


def _named_kind(run: RunConfig) -> Kind | None:
    """Of the hardware that a run file names; None where it names none."""
    config = run.hardware
    if config == "auto" or (config.file is None and config.preset is None):
        return None
    return hardware_for(config).device.kind


def _no_gpu(run: RunConfig) -> str:
    named = hardware_for(run.hardware).name
    why = "was built without CUDA" if torch.version.cuda is None else "sees none"
    return (
        f"hardware: {named} is a GPU, and torch {torch.__version__} {why} here: write "
        "hardware.preset=laptop-cpu to train on the CPU, or install a torch with CUDA on a machine "
        "with a GPU; sppo solve and sppo simulate need none"
    )
