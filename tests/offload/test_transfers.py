"""Copies of training state: locked memory is unlocked, unless the device no longer answers."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from sppo.offload import page_lock, transfers
from sppo.offload.queues import copy_streams, cuda_queues
from sppo.offload.transfers import CudaTransfers, ThreadTransfers
from tests.offload.queues.test_cuda_queues import (
    DeviceThatStandsStill,
    EventOfNow,
    runtime_without_a_gpu,
)


@pytest.fixture
def runtime(monkeypatch):
    found = runtime_without_a_gpu()
    for module in (cuda_queues, transfers):
        monkeypatch.setattr(module, "_cuda", found)
    return found


def test_a_device_that_no_longer_answers_is_left(runtime, monkeypatch):
    copies = CudaTransfers(torch.device("cpu"), failed_step_timeout_s=0.1)
    memory = copies.memory(4096)
    copies.to_device([(torch.empty(4096, dtype=torch.uint8), memory)])
    DeviceThatStandsStill(monkeypatch, runtime)
    begin_s = time.monotonic()
    assert not copies.wait_for_device()
    copies.close()
    assert time.monotonic() - begin_s < 5
    assert len(runtime.locked) == 1, "the device may still copy from it"


def test_a_device_that_answers_is_waited_for(runtime):
    assert CudaTransfers(torch.device("cpu"), failed_step_timeout_s=5.0).wait_for_device()


def test_a_host_that_waits_for_copies_sleeps(runtime, monkeypatch):
    waited = []
    monkeypatch.setattr(EventOfNow, "synchronize", lambda event: waited.append(event.blocking))
    CudaTransfers(torch.device("cpu")).to_tier([]).wait()
    assert waited == [True]


def test_host_memory_is_unlocked_once(runtime):
    copies = CudaTransfers(torch.device("cpu"))
    kept = [copies.memory(4096) for _ in range(2)]
    assert runtime.locked == {memory.data_ptr() for memory in kept}
    for _ in range(2):
        copies.close()
        assert runtime.locked == set()
    assert all(memory.sum() == 0 for memory in kept), "views stay valid"


@pytest.mark.parametrize("shape", [(0,), (1,), (64,), (7, 9), (5, 4, 13)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_copies_are_cut_and_copy_every_byte(runtime, monkeypatch, shape, dtype):
    """So that activations, which are copied in other streams, need not wait for a whole stage."""
    for module in (copy_streams, page_lock):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
    sizes = []
    copy = torch.Tensor.copy_

    def counted(target, source, **how):
        sizes.append(source.nbytes)
        return copy(target, source, **how)

    copies = CudaTransfers(torch.device("cpu"))
    source = torch.randn(shape).to(dtype)
    down, up = torch.empty_like(source), torch.empty_like(source)
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    copies.to_tier([(down, source)]).wait()
    copies.to_device([(up, down)]).wait()
    monkeypatch.undo()
    assert torch.equal(up, source)
    assert sum(sizes) == 2 * source.nbytes
    assert max(sizes, default=0) <= 64


def test_threads_end_with_the_copies():
    before = threading.active_count()
    copies = ThreadTransfers(lambda: None)
    target = torch.zeros(3)
    copies.to_device([(target, torch.ones(3))]).wait()
    for _ in range(2):
        copies.close()
        assert threading.active_count() == before
    assert target.sum() == 3
