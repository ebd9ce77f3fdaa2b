"""Rates of copies between host memory and CUDA devices, by size of a request.

Everything is as in training: host memory is an arena of huge pages registered with CUDA, and each
GPU has a process, which stays at the NUMA node of its GPU. The GPUs of a machine share its memory,
and some share a link to it, so they are measured at the same time. If cupy is installed, its copies
are measured, too: a difference would be the overhead of torch.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sppo.bench.copies import CopyMeasurements, CopyPoint, Times, each_way, measure_point
from sppo.bench.processes import at_once
from sppo.bench.timing import Watcher
from sppo.hardware.numa import node_of_pci_device, pci_address, stay_near
from sppo.hardware.this_machine import count_numa_nodes
from sppo.offload.arena import HostArena
from sppo.offload.page_lock import lock_pages, unlock_pages
from sppo.parallel.job.signals import STOP_SIGNALS, held_back
from sppo.parallel.job.worker_process import without_script
from sppo.units import GIB, MIB

_cuda: Any = torch.cuda  # parts of torch.cuda have no types

_Copy = Callable[[Tensor, Tensor, Any], object]
"""Function that starts to copy to a tensor from another one in a stream."""
_MEMCPY_DEFAULT = 4
"""Value of cudaMemcpyKind that finds the direction from the addresses."""

_REQUESTS = (MIB, 16 * MIB, 128 * MIB)
_QUICK_REQUESTS = (16 * MIB,)
_MOST_BYTES, _QUICK_MOST_BYTES = 2 * GIB, 256 * MIB
_FEWEST, _MOST = 4, 256
"""Fewest and most requests of one direction in one round."""
_ROUNDS, _QUICK_ROUNDS = 3, 1
_MEET_S, _MEASURE_S = 120.0, 1800.0
"""Longest times that a process waits for those of other GPUs, and that measuring may take."""


def measure_pcie(
    devices: Sequence[torch.device], *, quick: bool, watcher: Watcher
) -> CopyMeasurements:
    """Measure copies between the host and all of its GPUs at once; return those of the slowest.

    Args:
        devices: CUDA devices of this machine, each with its index.
        quick: Measure one size in one round.
        watcher: Receiver of the progress, notified of every GPU.

    Raises:
        MemoryError: A host that lacks the memory, or may not lock it.
        RuntimeError: The process of a GPU ended, or did not answer in time.
    """
    watcher.begin("pcie", total=len(devices))
    with held_back(STOP_SIGNALS), without_script():
        manager = multiprocessing.get_context("spawn").Manager()
    with manager:
        barrier = manager.Barrier(len(devices))
        found = at_once(
            _measure,
            [(device, barrier, quick) for device in devices],
            timeout_s=_MEASURE_S,
            advance=watcher.advance,
        )
    slowest = min(found, key=lambda one: _slower_way(one.planned))
    if len(devices) == 1:
        return slowest
    return replace(slowest, where=f"{slowest.where}, the slowest of {len(devices)} GPUs at once")


def _measure(device: torch.device, barrier: Any, quick: bool) -> CopyMeasurements:
    """Measure one GPU in a process of its own, in every round together with the other GPUs."""
    _cuda.set_device(device)
    node = node_of_pci_device(pci_address(_cuda.get_device_properties(device)))
    if node is not None:
        stay_near(node)
    requests = _QUICK_REQUESTS if quick else _REQUESTS
    most_bytes = _QUICK_MOST_BYTES if quick else _MOST_BYTES
    size_bytes = 2 * max(requests)
    on_device = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    points: list[CopyPoint] = []
    try:
        with _locked_arena(size_bytes, device) as memory:
            for (package, copy), size in product(_ways_to_copy().items(), requests):
                copies = _Streams(
                    memory,
                    on_device,
                    copy=copy,
                    request_bytes=size,
                    count=max(_FEWEST, min(_MOST, most_bytes // size)),
                    meet=partial(barrier.wait, _MEET_S),
                )
                copies.run(True, True)  # warm
                rounds = _QUICK_ROUNDS if quick else _ROUNDS
                point = measure_point(copies.run, request_bytes=size, rounds=rounds)
                points.append(replace(point, package=package))
    except threading.BrokenBarrierError:
        raise RuntimeError(f"measuring copies: a GPU was not ready within {_MEET_S:g} s") from None
    of_node = "" if node is None else f" of NUMA node {node.index} of {count_numa_nodes()}"
    where = f"host memory{of_node} and {_cuda.get_device_name(device)}"
    planned = [point for point in points if point.package == "torch"][-1]
    return CopyMeasurements("host", where, tuple(points), planned=planned)


def _ways_to_copy() -> dict[str, _Copy]:
    """Return the functions that copy, by package."""

    def by_torch(target: Tensor, source: Tensor, _: Any) -> object:
        return target.copy_(source, non_blocking=True)

    try:
        from cupy.cuda import runtime
    except ImportError:
        return {"torch": by_torch}

    def by_cupy(target: Tensor, source: Tensor, stream: Any) -> object:
        addresses, size = (target.data_ptr(), source.data_ptr()), target.numel()
        return runtime.memcpyAsync(*addresses, size, _MEMCPY_DEFAULT, stream.cuda_stream)

    return {"torch": by_torch, "cupy": by_cupy}


def _slower_way(point: CopyPoint) -> float:
    return min(point.out_bytes_per_s, point.back_bytes_per_s)


class _Streams:
    """Copies in both directions, each with its own stream and thread, ``count`` per direction.

    The host memory has one half per direction.
    """

    def __init__(
        self,
        host: Tensor,
        device: Tensor,
        *,
        copy: _Copy,
        request_bytes: int,
        count: int,
        meet: Callable[[], object],
    ) -> None:
        self._copy, self._count, self._device, self._meet = copy, count, device.device, meet
        half = device.numel() // 2
        ends = [(0, request_bytes), (half, half + request_bytes)]
        (host_out, host_back), (device_out, device_back) = (
            [memory[begin:end] for begin, end in ends] for memory in (host, device)
        )
        self._pairs = [(host_out, device_out), (device_back, host_back)]
        self._streams = [_cuda.Stream(device.device) for _ in self._pairs]

    def run(self, out: bool, back: bool) -> tuple[Times, Times]:
        """Return the completion times of (copies out, copies back); one or both directions run."""
        _cuda.synchronize(self._device)
        self._meet()
        begin = [_cuda.Event(enable_timing=True) for _ in range(2)]
        done: list[list[Any]] = [[], []]
        wanted = [index for index, asked in enumerate((out, back)) if asked]
        ready = threading.Barrier(len(wanted))

        def feed(index: int) -> None:
            ready.wait()
            self._feed(index, begin=begin[index], done=done[index])

        each_way(feed, wanted)
        _cuda.synchronize(self._device)
        # Both count from the earlier begin, or a direction that began later would seem faster.
        first = min(wanted, key=lambda index: begin[wanted[0]].elapsed_time(begin[index]))
        out_s, back_s = (
            [begin[first].elapsed_time(event) / 1e3 for event in events] for events in done
        )
        return out_s, back_s

    def _feed(self, index: int, *, begin: Any, done: list[Any]) -> None:
        (target, source), stream = self._pairs[index], self._streams[index]
        with _cuda.stream(stream):
            begin.record(stream)
            for _ in range(self._count):
                self._copy(target, source, stream)
                event = _cuda.Event(enable_timing=True)
                event.record(stream)
                done.append(event)


@contextmanager
def _locked_arena(size_bytes: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the memory of a page-locked arena."""
    memory = HostArena(size_bytes).tensor(0, (size_bytes,), torch.uint8)
    runtime = _cuda.cudart()
    lock_pages(runtime, memory)
    try:
        yield memory
    finally:
        _cuda.synchronize(device)
        unlock_pages(runtime, memory)
