"""Copy streams of a GPU: blocks come back unchanged, however late every copy runs."""

import mmap
import os
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from sppo.activations.activation_layout import ActivationKey, Extent, OffloadSchedule
from sppo.offload import cuda_lane, page_lock
from sppo.offload.block_store import BlockStore
from sppo.offload.cuda_lane import CudaLane
from sppo.offload.device_wait import wait_with_timeout
from sppo.offload.page_lock import PIECE_BYTES
from sppo.offload.worker_pool import THREADS, wait_for
from sppo.units import GIB
from tests.offload import test_block_store
from tests.offload.test_block_store import failing_disk, run_step

OUT_OF_MEMORY, LOCKED_ALREADY = 2, 712
"""``cudaErrorMemoryAllocation`` and ``cudaErrorHostMemoryAlreadyRegistered``."""
TOO_MANY_BYTES = 1 << 39
"""Bytes that the driver cannot lock in one call (NVIDIA/open-gpu-kernel-modules#1234)."""


def on_gpu(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


@contextmanager
def stream_that_runs_at_once(stream):
    yield


class EventOfNow:
    """Reached as soon as it is recorded."""

    def __init__(self, enable_timing=False, blocking=False):
        self.at_s, self.blocking = None, blocking

    def record(self, stream):
        self.at_s = time.perf_counter()

    def query(self):
        return self.at_s is not None

    def synchronize(self):
        assert self.at_s is not None, "waits for what nobody recorded"

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1e3


class StreamOfNow:
    """Runs everything at once; may only wait for what has been recorded."""

    cuda_stream = 0

    def __init__(self, device):
        pass

    def wait_event(self, event):
        event.synchronize()


def runtime_without_a_gpu(*, register_fails=False):
    """What a lane asks of torch.cuda, on this process's memory: the bookkeeping is the same."""
    locked, sizes, ends = set(), [], {}

    def register(address, size_bytes, flags):
        if register_fails or size_bytes >= TOO_MANY_BYTES:
            return OUT_OF_MEMORY
        if any(begin < address + size_bytes and address < ends[begin] for begin in locked):
            return LOCKED_ALREADY
        locked.add(address)
        sizes.append(size_bytes)
        ends[address] = address + size_bytes
        return 0

    def unregister(address):
        locked.remove(address)
        return 0

    def spans_two(address, size_bytes):
        """Whether a copy of this memory would span two locked ranges."""
        return any(address < ends[begin] < address + size_bytes for begin in locked)

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaGetErrorString={OUT_OF_MEMORY: "out of memory", LOCKED_ALREADY: "locked already"}.get,
    )
    return SimpleNamespace(
        Event=EventOfNow,
        Stream=StreamOfNow,
        stream=stream_that_runs_at_once,
        current_stream=StreamOfNow,
        synchronize=lambda device: None,
        set_device=lambda device: None,
        cudart=lambda: runtime,
        locked=locked,
        locked_sizes=sizes,
        spans_two=spans_two,
    )


def offloads(key, *, size_bytes):
    """A step that offloads one block."""
    return OffloadSchedule({key: Extent(0, size_bytes)}, [key], staging_slots=2, ring_slots=2)


@pytest.fixture
def no_gpu(monkeypatch):
    runtime = runtime_without_a_gpu()
    monkeypatch.setattr(cuda_lane, "_cuda", runtime)
    return runtime


class DeviceThatStandsStill:
    """Events of a device that no longer comes to any; whoever waits for them does so for ever."""

    def __init__(self, monkeypatch, runtime):
        for_ever = mock.Mock(
            side_effect=AssertionError("waits for a device that no longer answers")
        )
        monkeypatch.setattr(EventOfNow, "query", lambda event: False)
        monkeypatch.setattr(EventOfNow, "synchronize", for_ever)
        monkeypatch.setattr(StreamOfNow, "wait_event", lambda stream, event: None)
        runtime.synchronize = for_ever


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_device_that_no_longer_answers_is_left(no_gpu, monkeypatch, kind, tmp_path):
    lane = CudaLane(torch.device("cpu"), failed_step_timeout_s=0.1)
    store = BlockStore(lane, disk=tmp_path if kind == "disk" else None)
    run_step(store, interleaved=True, step=0)
    DeviceThatStandsStill(monkeypatch, no_gpu)
    begin_s = time.monotonic()
    for _ in range(2):
        assert not store.close()
    assert time.monotonic() - begin_s < 5
    assert lane.given_up
    assert len(no_gpu.locked) == 1, "the device may still copy to it"


def test_steps_of_growing_size_lock_each_byte_once(no_gpu):
    """And nothing at all in a step whose host memory was taken before."""
    store = BlockStore(CudaLane(torch.device("cpu"), most_host_bytes=GIB))
    steps = [offloads(ActivationKey(0, 0, 0), size_bytes=n * 4096) for n in (1, 2, 9000, 9001)]
    for step in steps:
        store.reserve_host(step)
        taken = list(no_gpu.locked_sizes)
        store.prepare(step)
        assert no_gpu.locked_sizes == taken
        assert sum(taken) < step.tier_bytes + PIECE_BYTES
    store.close()


def test_memory_of_each_name_is_locked_once_and_unlocked_once(no_gpu):
    lane = CudaLane(torch.device("cpu"))
    kept = [lane.host_memory(name, 4096) for name in ("weights", "gradients")]
    assert no_gpu.locked == {memory.data_ptr() for memory in kept}
    for _ in range(2):
        lane.close()
        assert no_gpu.locked == set()
    assert all(memory.sum() == 0 for memory in kept), "views stay valid"


def test_memory_that_a_device_may_still_use_is_not_replaced(no_gpu, monkeypatch):
    store = BlockStore(CudaLane(torch.device("cpu"), failed_step_timeout_s=0.1))
    small, large = (offloads(ActivationKey(0, 0, 0), size_bytes=n * 4096) for n in (1, 2))
    store.prepare(small)
    locked = set(no_gpu.locked)
    DeviceThatStandsStill(monkeypatch, no_gpu)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device does not answer"):
            store.prepare(large)
    assert no_gpu.locked == locked


def test_a_thread_that_waits_for_the_device_is_left(no_gpu, monkeypatch, tmp_path):
    """The write to the disk waits for a copy out that waits for another rank."""
    gate = threading.Event()
    lane = CudaLane(torch.device("cpu"), failed_step_timeout_s=0.1)
    lane.file.open(tmp_path, 4096)
    monkeypatch.setattr(EventOfNow, "synchronize", lambda event: gate.wait(20))
    host = page_aligned(4096)
    copied = lane.out([(host, torch.ones(1024).view(torch.uint8))], after=[])
    lane.file.write(0, host.numpy(), after=[copied])
    begin_s = time.monotonic()
    assert not lane.close()
    assert time.monotonic() - begin_s < 5
    assert lane.given_up
    gate.set()


def page_aligned(size_bytes):
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8))


class LateLane(CudaLane):
    """Every copy waits 4 million clock cycles, about 2 ms, before it starts."""

    def _begin(self, name, stream):
        if name != "compute":
            torch.cuda._sleep(4_000_000)
        return super()._begin(name, stream)


class LaneOnTheCpu(CudaLane):
    """Whose device memory is page-aligned host memory."""

    def device_memory(self, size_bytes):
        return page_aligned(size_bytes)


def test_threads_of_the_disk_compute_on_the_device_and_sleep_while_they_wait(
    no_gpu, monkeypatch, tmp_path
):
    set_by, waited = set(), []
    device = torch.device("cuda", 3)
    no_gpu.set_device = lambda chosen: set_by.add((threading.current_thread().name, chosen))
    synchronize = EventOfNow.synchronize

    def note(event):
        if threading.current_thread() is not threading.main_thread():
            waited.append(event.blocking)
        synchronize(event)

    monkeypatch.setattr(EventOfNow, "synchronize", note)
    bring_back(LaneOnTheCpu(device), kind="disk", lag=0, interleaved=False, directory=tmp_path)
    assert set_by == {(f"sppo disk {index}", device) for index in range(THREADS)}
    assert set(waited) == {True}


@pytest.mark.parametrize("shape", [(0,), (1,), (64,), (7, 9), (5, 4, 13)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_copies_are_cut_and_copy_every_byte(no_gpu, monkeypatch, shape, dtype):
    """So that activations, which are copied in other streams, need not wait for a whole stage."""
    for module in (cuda_lane, page_lock):
        monkeypatch.setattr(module, "PIECE_BYTES", 256)
    lane = CudaLane(torch.device("cpu"))
    source = torch.randn(shape).to(dtype)
    host, back = torch.empty_like(source), torch.empty_like(source)
    wait_for(lane.out([(host, source)], after=[]))
    wait_for(lane.back([(back, host)], after=[]))
    assert torch.equal(back, source)


def test_the_runtime_forgets_an_error_that_was_told(monkeypatch):
    asked = []

    def library(name, mode):
        assert mode & os.RTLD_NOLOAD, "the library that torch uses, or none"
        asked.append(name)
        return SimpleNamespace(cudaGetLastError=lambda: asked.append("asked"))

    monkeypatch.setattr(page_lock.ctypes, "CDLL", library)
    monkeypatch.setattr(page_lock.torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_lane, "_cuda", runtime_without_a_gpu(register_fails=True))
    refused = (
        r"NVIDIA driver refuses to page-lock 4.0 KiB of .*in all \(out of memory\); offload less"
    )
    with pytest.raises(MemoryError, match=refused):
        CudaLane(torch.device("cpu")).host_memory("blocks", 4096)
    assert asked == ["libcudart.so.13", "asked"]


# Whether a device still gets on


class Mark:
    """A point that the device comes to after some questions, or fails at."""

    def __init__(self, after=0, *, error=None):
        self._left, self._error = after, error

    def query(self):
        if self._error is not None:
            raise self._error
        self._left -= 1
        return self._left < 0


def done(runtime, marks=(), *, stall_timeout_s=0.1):
    device = torch.device("cpu")
    stream = runtime.Stream(device)
    return wait_with_timeout(
        runtime, device, [stream], stall_timeout_s=stall_timeout_s, marks=marks
    )


def test_a_device_that_gets_on_is_waited_for(no_gpu):
    begin_s = time.monotonic()
    assert done(no_gpu, [Mark(after=60) for _ in range(8)], stall_timeout_s=0.5)
    assert time.monotonic() - begin_s > 0.4
    assert done(no_gpu)


def test_a_device_that_stands_still_is_given_up(no_gpu, monkeypatch):
    assert not done(no_gpu, [Mark(), Mark(after=10**9)])
    monkeypatch.setattr(EventOfNow, "query", lambda event: False)
    assert not done(no_gpu)


def test_a_device_whose_queue_is_full_is_given_up(no_gpu, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(EventOfNow, "record", lambda event, stream: gate.wait(20))
    assert not done(no_gpu)
    gate.set()


def test_what_a_device_fails_with_is_raised(no_gpu):
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        done(no_gpu, [Mark(error=RuntimeError("an illegal memory access"))])


@pytest.fixture
def tensors_on_the_gpu(monkeypatch):
    original = test_block_store.tensors_of
    monkeypatch.setattr(
        test_block_store,
        "tensors_of",
        lambda key, **options: {n: t.cuda() for n, t in original(key, **options).items()},
    )


def bring_back(lane, *, kind, lag, interleaved, directory):
    store = BlockStore(lane, disk=directory if kind == "disk" else None, source_lag=lag, debug=True)
    for step in range(3):
        run_step(store, interleaved=interleaved, step=step)
    assert not store._sources
    report = store.take_report()
    assert report.out_bytes == report.back_bytes
    assert report.out_s > 0 < report.back_s
    store.close()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lag", [0, 5])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_the_bookkeeping_needs_no_gpu(no_gpu, kind, lag, interleaved, tmp_path):
    lane = CudaLane(torch.device("cpu"))
    bring_back(lane, kind=kind, lag=lag, interleaved=interleaved, directory=tmp_path)
    assert not no_gpu.locked


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_step_whose_disk_fails_leaves_no_memory_locked(no_gpu, verb, tmp_path):
    store = BlockStore(CudaLane(torch.device("cpu")), disk=tmp_path, source_lag=5)
    with failing_disk(verb), pytest.raises(OSError, match="the disk failed"):
        run_step(store, interleaved=True)
    assert store.close()
    assert not no_gpu.locked


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 5])
@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("lane", [CudaLane, LateLane])
@pytest.mark.usefixtures("tensors_on_the_gpu")
@on_gpu
def test_streams_bring_back_what_was_sent(lane, kind, lag, interleaved, tmp_path):
    made = lane(torch.device("cuda", 0))
    bring_back(made, kind=kind, lag=lag, interleaved=interleaved, directory=tmp_path)


@pytest.mark.usefixtures("tensors_on_the_gpu")
@on_gpu
def test_a_step_given_up_is_waited_for():
    lane = LateLane(torch.device("cuda", 0))
    store = BlockStore(lane, debug=True)
    key = test_block_store.unit_keys(0, 0)[0]
    store.prepare(offloads(key, size_bytes=4096))
    store.put(key, offloaded=test_block_store.tensors_of(key))
    assert store.close()
    assert torch.cuda.current_stream().query()


@on_gpu
def test_host_memory_is_page_locked():
    lane = CudaLane(torch.device("cuda", 0))
    memory = lane.host_memory("blocks", 1 << 20)
    assert memory.is_pinned()
    lane.close()
    assert not memory.is_pinned()
