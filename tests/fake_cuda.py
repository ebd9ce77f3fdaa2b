"""Fake CUDA runtime: the logic of the CUDA path on the memory of this process.

Streams run all work at once, and tensors are on the CPU. Tests cover the decisions and accounting
around a GPU, and nothing of what a GPU itself does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from sppo.engine import trace
from sppo.engine.engine import Engine, StepResult
from sppo.hardware.numa import NumaNode
from sppo.offload import cuda_lane
from sppo.training.devices import cuda_device
from sppo.training.devices.cuda_device import CudaDevice
from sppo.units import GIB, MIB
from tests.offload.test_cuda_lane import EventOfNow, runtime_without_a_gpu

NAME = "NVIDIA H200"
TOTAL_BYTES = 141 * GIB
RESERVED_BYTES, ALLOCATED_BYTES, ALLOCATED_PEAK_BYTES = 40 * MIB, 10 * MIB, 30 * MIB


class FakeGpu(CudaDevice):
    """A :class:`CudaDevice` whose ranks talk over gloo, as its tensors are the CPU's."""

    __slots__ = ()

    @property
    def group_device(self) -> torch.device | None:
        return None


@contextmanager
def fake_gpu(*, free_bytes: int = TOTAL_BYTES) -> Iterator[tuple[FakeGpu, Any]]:
    """A device, and its runtime; ``runtime.waits`` counts how often the host waited for it."""
    runtime = runtime_without_a_gpu()
    counts = SimpleNamespace(waits=0, set_to=[], trims=0, near=[])

    class Event(EventOfNow):
        def synchronize(self) -> None:
            counts.waits += 1
            super().synchronize()

    class Stream(runtime.Stream):
        def wait_event(self, event: Any) -> None:
            assert event.query(), "a stream waits for what nobody recorded"

    def synchronize(device: Any) -> None:
        counts.waits += 1

    def stay_near(node: NumaNode) -> NumaNode:
        counts.near.append(node)
        return node

    def empty_cache() -> None:
        counts.trims += 1

    found = SimpleNamespace(
        **{
            **vars(runtime),
            "Event": Event,
            "Stream": Stream,
            "current_stream": Stream,
            "synchronize": synchronize,
            "empty_cache": empty_cache,
            "set_device": counts.set_to.append,
            "get_device_name": lambda device: NAME,
            "device_count": lambda: 1,
            "get_device_properties": lambda device: SimpleNamespace(
                total_memory=TOTAL_BYTES, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0
            ),
            "mem_get_info": lambda device: (free_bytes, TOTAL_BYTES),
            "memory_reserved": lambda device: RESERVED_BYTES,
            "memory_allocated": lambda device: ALLOCATED_BYTES,
            "max_memory_reserved": lambda device: 2 * RESERVED_BYTES,
            "max_memory_allocated": lambda device: ALLOCATED_PEAK_BYTES,
            "reset_peak_memory_stats": lambda device: None,
            "counts": counts,
        }
    )
    with ExitStack() as stack:
        for module in (cuda_lane, cuda_device, trace):
            stack.enter_context(patch.object(module, "_cuda", found))
        stack.enter_context(patch.object(cuda_device, "_page_locked", lambda tensor: tensor))
        stack.enter_context(patch.object(cuda_device, "stay_near", stay_near))
        measured = patch.object(
            cuda_device, "measure_matmul_flops_per_s", lambda dtype, device: 1e10
        )
        stack.enter_context(measured)
        yield FakeGpu(torch.device("cpu")), found


@contextmanager
def steps_lock_nothing(runtime: Any) -> Iterator[None]:
    """Host memory is page-locked before the first step, while no other rank waits."""
    accumulate = Engine.accumulate

    def checked(engine: Engine, *arguments: Any, **named: Any) -> StepResult:
        before = list(runtime.locked_sizes)
        done = accumulate(engine, *arguments, **named)
        assert runtime.locked_sizes == before
        return done

    with patch.object(Engine, "accumulate", checked):
        yield
