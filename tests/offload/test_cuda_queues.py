"""The copy streams of a GPU: what comes back is what was sent, however late every copy is."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from sppo.offload import cuda_queues
from sppo.offload.cuda_queues import CudaQueues
from sppo.offload.offload_store import OffloadStore
from tests.offload import test_offload_store as test_moving_store
from tests.offload.test_offload_store import failing_disk, run_step

DELAYS = {"none": 0, "every copy 2 ms late": 4_000_000}


def on_gpu(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


@contextmanager
def stream_that_runs_at_once(stream):
    yield


class EventOfNow:
    """Reached as soon as it is recorded."""

    def __init__(self, enable_timing=False):
        self.at_s = None

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

    def __init__(self, device):
        pass

    def wait_event(self, event):
        event.synchronize()


def runtime_without_a_gpu(*, register_fails=False):
    """What the queues ask of torch.cuda, on this process's memory: the bookkeeping is the same."""
    locked = set()

    def register(address, size_bytes, flags):
        locked.add(address)
        return int(register_fails)

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.remove)
    return SimpleNamespace(
        Event=EventOfNow,
        Stream=StreamOfNow,
        stream=stream_that_runs_at_once,
        current_stream=StreamOfNow,
        synchronize=lambda device: None,
        cudart=lambda: runtime,
        locked=locked,
    )


@pytest.fixture
def no_gpu(monkeypatch):
    runtime = runtime_without_a_gpu()
    monkeypatch.setattr(cuda_queues, "_cuda", runtime)
    return runtime


@pytest.fixture
def tensors_on_the_gpu(monkeypatch):
    original = test_moving_store.tensors_of
    monkeypatch.setattr(
        test_moving_store,
        "tensors_of",
        lambda key, **options: {n: t.cuda() for n, t in original(key, **options).items()},
    )


def bring_back(queues, *, kind, lag, interleaved, directory):
    disk = directory if kind == "disk" else None
    store = OffloadStore(queues, disk=disk, source_lag=lag)
    for step in range(3):
        run_step(store, interleaved=interleaved, step=step)
    assert not queues._sources
    report = store.take_report()
    assert report.out_bytes == report.back_bytes
    assert report.out_s > 0 < report.back_s
    store.close()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lag", [0, 5])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_the_bookkeeping_needs_no_gpu(no_gpu, kind, lag, interleaved, tmp_path):
    queues = CudaQueues(torch.device("cpu"), poison=True)
    bring_back(queues, kind=kind, lag=lag, interleaved=interleaved, directory=tmp_path)
    assert not no_gpu.locked


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_failed_step_leaves_no_times_behind(no_gpu, verb, tmp_path):
    """Events of copies that were left out have none; the next report asks only for its own."""
    store = OffloadStore(CudaQueues(torch.device("cpu")), disk=tmp_path, source_lag=5)
    run_step(store, interleaved=True, step=0)
    store.take_report()
    with failing_disk(verb), pytest.raises(OSError, match="the disk failed"):
        run_step(store, interleaved=True, step=1)
    store.abort()
    run_step(store, interleaved=True, step=2)
    assert store.take_report().total_out_bytes > 0
    store.close()


def test_memory_that_cannot_be_locked_is_said(monkeypatch):
    monkeypatch.setattr(cuda_queues, "_cuda", runtime_without_a_gpu(register_fails=True))
    with pytest.raises(MemoryError, match="refuses to page-lock 4096 bytes .*; raise ulimit -l"):
        CudaQueues(torch.device("cpu")).host_memory(4096)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 5])
@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("delay_cycles", DELAYS.values(), ids=DELAYS)
@pytest.mark.usefixtures("tensors_on_the_gpu")
@on_gpu
def test_streams_bring_back_what_was_sent(delay_cycles, kind, lag, interleaved, tmp_path):
    queues = CudaQueues(torch.device("cuda"), poison=True, delay_cycles=delay_cycles)
    bring_back(queues, kind=kind, lag=lag, interleaved=interleaved, directory=tmp_path)


@pytest.mark.usefixtures("tensors_on_the_gpu")
@on_gpu
def test_a_step_given_up_leaves_the_streams_idle():
    class GiveUpError(Exception):
        pass

    def give_up(key, tensors):
        raise GiveUpError

    queues = CudaQueues(torch.device("cuda"), poison=True, delay_cycles=4_000_000)
    store = OffloadStore(queues)
    with pytest.raises(GiveUpError):
        run_step(store, interleaved=True, alter=give_up)
    store.abort()
    run_step(store, interleaved=True, step=1)
    store.close()


@on_gpu
def test_host_memory_is_page_locked():
    queues = CudaQueues(torch.device("cuda"))
    memory = queues.host_memory(1 << 20)
    assert memory.is_pinned()
    assert queues.register_s > 0
    queues.close()
    assert not memory.is_pinned()
