"""Copies of training state: a device that no longer answers is left, with what it may use."""

from __future__ import annotations

import time

import pytest
import torch

from sppo.offload import cuda_queues, transfers
from sppo.offload.transfers import CudaTransfers
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
    assert time.monotonic() - begin_s < 5


def test_a_device_that_answers_is_waited_for(runtime):
    assert CudaTransfers(torch.device("cpu"), give_up_s=5.0).wait_for_device()
