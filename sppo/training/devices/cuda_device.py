"""A GPU as the device of a rank.

The host issues work and runs ahead of the GPU. It waits for the GPU only at the end of a step, to
read the loss, the gradient norm and the time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sppo.engine.trace import CudaStopwatch, Stopwatch
from sppo.engine.unit import SequenceData
from sppo.hardware.description import HOST_FRACTION, DeviceKind, HardwareSpec
from sppo.hardware.numa import NumaNode, node_of_pci_device, pci_address, stay_near
from sppo.hardware.this_machine import (
    count_cores,
    count_numa_nodes,
    describe_gpus,
    usable_memory_bytes,
)
from sppo.kernels.native.machine_memory import memory_room
from sppo.kernels.peak import measure_matmul_flops_per_s
from sppo.offload.block_store import BlockStore
from sppo.offload.cuda_lane import CudaLane
from sppo.offload.device_wait import wait_with_timeout
from sppo.offload.lane import Lane
from sppo.offload.state_memory import StateMemory
from sppo.parallel.job.environment import RankEnvironment, threads_of_gpu_rank
from sppo.planning.plan import ExecutionPlan
from sppo.training.devices.cpu_device import PoolUse

_cuda: Any = torch.cuda  # parts of it have no types
_log = logging.getLogger(__name__)

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the settings of torch's caching allocator; the first one wins."""
SETTINGS = {
    # Freed memory can be reused for other sizes, so reserved memory stays close to used memory.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # A message that waits for its sender must never block compute in a hardware queue, so every
    # stream gets a queue: compute, two for copies, one for each direction of each edge.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Kernels of several communicators must run in the same order on all devices, or they may wait
    # for each other's resources. This makes it the host's order (tests/engine/test_nccl_rules.py).
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    # Dump the pending operations of NCCL on a timeout; sppo.parallel.job.environment has the path.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # Messages between stages are not batched, on communicators that carry no other messages.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
"""Environment variables that CUDA and torch read when they are first used."""


def prepare_cuda() -> None:
    """Set :data:`SETTINGS` that the user has not set; must run before CUDA is first used."""
    is_given = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    for name, value in SETTINGS.items():
        if name not in ALLOCATOR_VARIABLES or not is_given:
            os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU.

    Attributes:
        torch_device: Torch device of the GPU.
        kind: Always "cuda".
    """

    torch_device: torch.device
    kind: DeviceKind = "cuda"

    @property
    def group_device(self) -> torch.device | None:
        """The GPU; NCCL sends its tensors between ranks."""
        return self.torch_device

    def begin(self, environment: RankEnvironment | None = None) -> None:
        """Make the GPU torch's current device, and bind the process to the nearest NUMA node.

        Called before any tensor is allocated; a second call does nothing more.

        Args:
            environment: Place of this process in its job, at the first call; None if it is alone.
        """
        _cuda.set_device(self.torch_device)
        allowed = cores = count_cores()
        node = _node_of(self.torch_device)
        if node is not None:
            kept = stay_near(node).cores
            if kept:
                cores = len(kept)
                _log.info("on %d cores of NUMA node %d, next to the GPU", cores, node.index)
            else:
                _warn_of_far_cores(node.index)
        threads = min(torch.get_num_threads(), cores)
        if environment is not None:
            threads = threads_of_gpu_rank(
                environment,
                os.environ,
                cores=cores,
                ranks_near=self._ranks_near(node, environment.local_world_size),
                allowed_cores=allowed,
            )
        torch.set_num_threads(threads)

    def _ranks_near(self, node: NumaNode | None, local_ranks: int) -> int:
        """Return how many ranks of this machine have their GPU at the same NUMA node.

        srun may show each task only its own GPU; GPUs are then taken to be evenly spread.
        """
        if node is None:
            return local_ranks
        if _cuda.device_count() < local_ranks:
            return -(-local_ranks // count_numa_nodes())
        others = (torch.device("cuda", index) for index in range(local_ranks))
        return sum(_node_of(other) == node for other in others)

    def describe(self) -> str:
        """Return the GPU's name and index."""
        return f"{_cuda.get_device_name(self.torch_device)} ({self.torch_device})"

    def machine(self) -> HardwareSpec:
        """Return the description of this machine's GPUs and usable host memory."""
        return describe_gpus(
            _cuda.get_device_name(self.torch_device),
            count=_cuda.device_count(),
            memory_bytes=self._total_bytes(),
            host_bytes=usable_memory_bytes(),
        )

    def free_bytes(self, *, local_ranks: int) -> int:
        """Return the free memory of the GPU, torch's unused reserve included, in bytes."""
        free, _ = _cuda.mem_get_info(self.torch_device)
        unused = _cuda.memory_reserved(self.torch_device) - _cuda.memory_allocated(
            self.torch_device
        )
        return int(free) + int(unused)

    def host_tier_bytes(self, *, local_ranks: int) -> int:
        """Return this rank's share of the host memory for offloaded tensors, in bytes."""
        return int(memory_room().least_bytes * HOST_FRACTION) // local_ranks

    def capacity_bytes(self, *, baseline_bytes: int) -> int:
        """Return the total memory of the GPU in bytes."""
        return self._total_bytes()

    def peak_flops_per_s(self, dtype: torch.dtype) -> float:
        """Measure matrix products on the GPU now, and return their FLOPs per second."""
        return measure_matmul_flops_per_s(dtype, device=self.torch_device)

    def held_bytes(self) -> int:
        """Return the bytes that torch has reserved on the GPU."""
        return int(_cuda.memory_reserved(self.torch_device))

    def reset_peak(self) -> None:
        """Reset torch's peak memory statistics."""
        _cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        """Return the peak of the bytes that torch has reserved on the GPU."""
        return int(_cuda.max_memory_reserved(self.torch_device))

    def file_bytes(self) -> int:
        """Return 0: a GPU's memory has no pages of files."""
        return 0

    def pool(self) -> PoolUse | None:
        """Return the memory that tensors use in torch's reserved memory, now and at the peak."""
        return PoolUse(
            int(_cuda.memory_allocated(self.torch_device)),
            int(_cuda.max_memory_allocated(self.torch_device)),
        )

    def trim(self) -> None:
        """Wait for the GPU, then release torch's unused reserved memory."""
        _cuda.synchronize(self.torch_device)
        _cuda.empty_cache()

    def put(self, sequence: SequenceData) -> SequenceData:
        """Copy tokens to the GPU from page-locked memory, asynchronously; labels stay here.

        The engine copies the labels that count.
        """
        return replace(sequence, tokens_S=self._put(sequence.tokens_S))

    def synchronize(self) -> None:
        """Wait until all work issued to the GPU is done."""
        _cuda.synchronize(self.torch_device)

    def wait_with_timeout(self, marks: Sequence[Any], *, stall_timeout_s: float) -> bool:
        """Wait for the work issued so far; return False if the GPU makes no progress too long.

        Args:
            marks: Marks of the stopwatch, in the order in which compute reaches them.
            stall_timeout_s: Longest time in seconds in which compute may reach no mark.

        Raises:
            RuntimeError: The device has failed.
        """
        stream = _cuda.current_stream(self.torch_device)
        return wait_with_timeout(
            _cuda, self.torch_device, [stream], stall_timeout_s=stall_timeout_s, marks=marks
        )

    def stopwatch(self) -> Stopwatch:
        """Return a stopwatch that records CUDA events."""
        return CudaStopwatch(self.torch_device)

    def state_lane(
        self, memory: StateMemory | None, *, failed_step_timeout_s: float | None
    ) -> Lane:
        """Return the lane of training state to and from page-locked host memory.

        Args:
            memory: None: the tier is host memory, not a file.
            failed_step_timeout_s: Longest time in seconds to wait for the copies of a failed step;
                None for no limit.
        """
        assert memory is None, "what leaves a GPU goes to host memory"
        return CudaLane(
            self.torch_device, is_timed=False, failed_step_timeout_s=failed_step_timeout_s
        )

    def block_store(
        self,
        plan: ExecutionPlan,
        *,
        disk: Path | None,
        debug: bool,
        failed_step_timeout_s: float | None,
    ) -> BlockStore:
        """Return a store that offloads to page-locked host memory, or through it to a disk.

        Args:
            plan: Plan of the run.
            disk: Directory of a disk tier; None without one.
            debug: Verify checksums of the copies back, and overwrite each slot after its use.
            failed_step_timeout_s: Longest time in seconds to wait for the copies of a failed step;
                None for no limit.
        """
        assert disk is not None or plan.activation_tier != "disk", "checked before training"
        lane = CudaLane(
            self.torch_device,
            most_host_bytes=self.host_tier_bytes(local_ranks=1),
            failed_step_timeout_s=failed_step_timeout_s,
        )
        disk = disk if plan.activation_tier == "disk" else None
        return BlockStore(lane, disk=disk, debug=debug)

    def _put(self, tensor: Tensor) -> Tensor:
        """Copy `tensor` to the GPU asynchronously; torch frees the page-locked copy after that."""
        return _page_locked(tensor).to(self.torch_device, non_blocking=True)

    def _total_bytes(self) -> int:
        return int(_cuda.get_device_properties(self.torch_device).total_memory)


def _page_locked(tensor: Tensor) -> Tensor:
    return tensor.pin_memory()


@cache
def _warn_of_far_cores(index: int) -> None:
    """Warn once that the process may use no core of the NUMA node next to its GPU."""
    _log.warning(
        "no core of NUMA node %d, which is next to the GPU, may be used: updates on the CPU read "
        "memory through the link between processors; under srun write --distribution=block:block, "
        "or --cpu-bind=none",
        index,
    )


def _node_of(device: torch.device) -> NumaNode | None:
    """Return the NUMA node of a GPU; None if the machine does not tell it."""
    return node_of_pci_device(pci_address(_cuda.get_device_properties(device)))
