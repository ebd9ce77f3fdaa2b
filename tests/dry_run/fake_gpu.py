"""Fake GPU: a context in which a training step runs without a GPU, data, threads or files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sppo.cost.attention_backend import planned_backend
from sppo.cost.workload import Workload
from sppo.kernels import fused
from sppo.kernels.attention import interface, rectangle_attention
from sppo.kernels.attention.choice import AttentionKernel
from sppo.model import rope
from sppo.model.recurrence import Recurrence
from sppo.offload import cuda_lane, lane, state_memory
from sppo.training.devices import cuda_device
from sppo.training.weights import starting_weights
from tests.dry_run.attention import fake_attention
from tests.dry_run.communication import REBOUND, FakeRanks
from tests.dry_run.disk_threads import FakeFile
from tests.dry_run.orderings import OrderingCheck
from tests.dry_run.recorder import Recorder
from tests.dry_run.recurrence import fake_backward
from tests.dry_run.streams import Runtime, Wait
from tests.dry_run.tensor_functions import DevicelessFunctions

_CAPABILITY = (9, 0)
"""Compute capability of the fake GPU. No step depends on it: the plan has the back end."""
_CACHED_TENSORS = (rope._frequencies_on, rectangle_attention._offsets)
"""Functions with caches of device tensors, which are cleared before and after each fake GPU."""


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """Fake GPU of one rank.

    Attributes:
        recorder: Recorder of all work on the GPU.
        backend: Name of the attention back end that the fake one replaces.
    """

    recorder: Recorder
    backend: str

    @property
    def runtime(self) -> Runtime:
        """Runtime with the streams and the memory of the GPU."""
        return self.recorder.runtime


@contextmanager
def fake_gpu(
    workload: Workload,
    *,
    rank: int = 0,
    orderings: OrderingCheck | None = None,
    lost: frozenset[Wait] = frozenset(),
) -> Iterator[FakeGpu]:
    """Make this process compute on a fake GPU within the context.

    Tensors are torch's fake tensors, which have shapes and no data. No kernel is compiled, and no
    thread or file is created. No other thread of the process may use torch meanwhile.

    Args:
        workload: Model, machine and dtype of the training run.
        rank: Rank of this process among those of the run.
        orderings: Check that is given every access of memory; None for no check.
        lost: Waits that are left out, to test the check.
    """
    hardware, backend = workload.hardware, planned_backend(workload)
    runtime = Runtime(
        hardware.name,
        memory_bytes=hardware.device.memory_bytes,
        capability=_CAPABILITY,
        lost=lost,
    )
    recorder = Recorder(runtime, orderings=orderings)
    with ExitStack() as stack:
        for name, other in vars(runtime.module).items():
            stack.enter_context(patch.object(torch.cuda, name, other))
        stack.enter_context(patch.object(torch.cuda, "device", lambda _: nullcontext()))
        _replace_ranks(stack, recorder, rank)
        _replace_kernels(stack, recorder, fake_attention(backend))
        stack.enter_context(patch.object(Recurrence, "backward", fake_backward(workload)))
        _replace_host(stack, recorder)
        for tables in _CACHED_TENSORS:
            tables.cache_clear()
            stack.callback(tables.cache_clear)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        stack.enter_context(DevicelessFunctions(recorder))
        yield FakeGpu(recorder, backend)


def _replace_ranks(stack: ExitStack, recorder: Recorder, rank: int) -> None:
    functions = FakeRanks(recorder, rank=rank).functions()
    for name, function in functions.items():
        stack.enter_context(patch.object(dist, name, function))
    nccl = SimpleNamespace(Options=lambda **_: SimpleNamespace(config=SimpleNamespace()))
    stack.enter_context(patch.object(dist, "ProcessGroupNCCL", nccl, create=True))
    for module, names in REBOUND.items():
        for name in names.split():
            stack.enter_context(patch.object(import_module(module), name, functions[name]))


def _replace_kernels(stack: ExitStack, recorder: Recorder, attention: AttentionKernel) -> None:
    stack.enter_context(patch.object(interface, "kernel_of", lambda call: attention))
    stack.enter_context(patch.object(fused, "_triton_works", lambda device: True))
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        recorder.launch(self, dict(zip(self.arg_names, args, strict=False)) | named)

    for kind in (JITFunction, InterpretedFunction):
        stack.enter_context(patch.object(kind, "run", run))


def _replace_host(stack: ExitStack, recorder: Recorder) -> None:
    def host_memory(lane: Any, name: str, size_bytes: int) -> Tensor:
        return recorder.ledger.page_lock(torch.empty(size_bytes, dtype=torch.uint8))

    def arena(size_bytes: int) -> Any:
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        return SimpleNamespace(tensor=lambda offset, shape, dtype: memory)

    def empty_weights(
        shapes: Mapping[str, tuple[int, ...]], **_: Any
    ) -> Iterator[tuple[str, Tensor]]:
        return ((name, torch.empty(shape)) for name, shape in shapes.items())

    replaced = (
        (cuda_lane.CudaLane, "host_memory", host_memory),
        (lane, "FileTier", partial(FakeFile, recorder=recorder)),
        (state_memory, "HostArena", arena),
        (cuda_device, "_page_locked", recorder.ledger.page_lock),
        (starting_weights, "generate_weights_ahead", empty_weights),
    )
    for where, name, other in replaced:
        stack.enter_context(patch.object(where, name, other))
