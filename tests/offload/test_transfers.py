"""Copies of training state: what they lock is unlocked, unless the device no longer answers."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from sppo.offload import cuda_queues, transfers
from sppo.offload.transfers import CudaTransfers, ThreadTransfers
from tests.offload.test_cuda_queues import DeviceThatStandsStill, runtime_without_a_gpu


@pytest.fixture
def runtime(monkeypatch):
    found = runtime_without_a_gpu()
    for module in (cuda_queues, transfers):
        monkeypatch.setattr(module, "_cuda", found)
    return found


def test_a_device_that_no_longer_answers_is_left(runtime, monkeypatch):
    copies = CudaTransfers(torch.device("cpu"), give_up_s=0.1)
    memory = copies.memory(4096)
    copies.up([(torch.empty(4096, dtype=torch.uint8), memory)])
    DeviceThatStandsStill(monkeypatch, runtime)
    begin_s = time.monotonic()
    assert not copies.wait_for_device()
    copies.close()
    assert time.monotonic() - begin_s < 5
    assert len(runtime.locked) == 1, "the device may still copy from it"


def test_a_device_that_answers_is_waited_for(runtime):
    assert CudaTransfers(torch.device("cpu"), give_up_s=5.0).wait_for_device()


def test_host_memory_is_unlocked_once(runtime):
    copies = CudaTransfers(torch.device("cpu"))
    kept = [copies.memory(4096) for _ in range(2)]
    assert runtime.locked == {memory.data_ptr() for memory in kept}
    for _ in range(2):
        copies.close()
        assert runtime.locked == set()
    assert all(memory.sum() == 0 for memory in kept), "views stay valid"


def test_threads_end_with_the_copies():
    before = threading.active_count()
    copies = ThreadTransfers(lambda: None)
    target = torch.zeros(3)
    copies.up([(target, torch.ones(3))]).wait()
    for _ in range(2):
        copies.close()
        assert threading.active_count() == before
    assert target.sum() == 3
