"""Copies of a GPU: measured if there is a GPU; elsewhere everything except the device is tested."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sppo.bench import overlap, pcie, processes
from sppo.bench.copies import CopyMeasurements, CopyPoint
from sppo.bench.operands import Operands
from sppo.bench.overlap import measure_overlap, measured_layer
from sppo.hardware.numa import NumaNode
from sppo.offload import cuda_lane
from sppo.offload.cuda_lane import CudaLane
from sppo.units import MIB
from tests.bench.test_timing import Watcher
from tests.offload.test_cuda_lane import on_gpu, runtime_without_a_gpu

CPU = torch.device("cpu")
TWO = [torch.device("cuda", index) for index in range(2)]


class WorkerThread:
    """In place of a :class:`WorkerProcess`, which would not have what a test replaces."""

    def __init__(self):
        self._executor = ThreadPoolExecutor(1)

    def submit(self, function, *arguments):
        return self._executor.submit(function, *arguments)

    def result(self, future, *, timeout_s):
        return future.result(timeout_s)

    def close(self):
        self._executor.shutdown()


@pytest.fixture
def near(monkeypatch):
    """Nodes near which processes stay: each GPU has one of its own."""
    nodes = []
    monkeypatch.setattr(pcie, "pci_address", lambda properties: properties)
    monkeypatch.setattr(pcie, "node_of_pci_device", lambda index: NumaNode(index, frozenset({0})))
    monkeypatch.setattr(pcie, "stay_near", lambda node: nodes.append(node.index))
    return nodes


@pytest.fixture
def no_gpu(monkeypatch, near):
    """What the benchmarks ask of torch.cuda, on this process's memory."""
    runtime = runtime_without_a_gpu()
    runtime.get_device_name = lambda device: "no GPU"
    runtime.get_device_properties = lambda device: device.index or 0
    for module in (pcie, overlap, cuda_lane):
        monkeypatch.setattr(module, "_cuda", runtime)
    monkeypatch.setattr(processes, "WorkerProcess", WorkerThread)
    monkeypatch.setattr(pcie, "_QUICK_REQUESTS", (MIB // 2, MIB))
    monkeypatch.setattr(pcie, "_QUICK_MOST_BYTES", 4 * MIB)
    return runtime


def measured_by(watcher):
    return watcher.advanced == sum(total for _, total in watcher.begun)


@pytest.mark.parametrize("gpus", [1, 2])
def test_everything_but_the_device(no_gpu, near, gpus):
    watcher = Watcher()
    devices = [torch.device("cpu", index) for index in range(gpus)]
    found = pcie.measure_pcie(devices, quick=True, watcher=watcher)
    assert measured_by(watcher)
    assert [point.request_bytes for point in found.points] == [MIB // 2, MIB]
    assert found.planned is found.points[1]
    assert found.where.endswith("the slowest of 2 GPUs at once") == (gpus == 2)
    assert sorted(near) == list(range(gpus))
    assert not no_gpu.locked
    assert found.where.startswith("host memory of NUMA node ")


def test_memory_that_cannot_be_locked_is_said(no_gpu, monkeypatch):
    refusing = runtime_without_a_gpu(register_fails=True)
    monkeypatch.setattr(no_gpu, "cudart", refusing.cudart)
    with pytest.raises(MemoryError, match="the NVIDIA driver refuses to page-lock"):
        pcie.measure_pcie([CPU], quick=True, watcher=Watcher())


@pytest.fixture
def two_gpus(no_gpu, monkeypatch):
    """Measures two devices, of which the second copies at half the rate, once both are ready."""

    def measured(device, barrier, quick):
        barrier.wait(0.5)  # a thread that waits cannot be killed
        rate = 1e9 / (1 + device.index)
        point = CopyPoint(MIB, rate, rate, rate, rate)
        return CopyMeasurements("host", f"GPU {device.index}", (point,), planned=point)

    monkeypatch.setattr(pcie, "_measure", measured)
    return measured


def test_plans_use_the_slowest_gpu(two_gpus):
    found = pcie.measure_pcie(TWO, quick=True, watcher=Watcher())
    assert found.planned.out_bytes_per_s == 5e8
    assert found.where == "GPU 1, the slowest of 2 GPUs at once"


def test_a_gpu_that_fails_ends_the_others(two_gpus, monkeypatch):
    def fails(device, barrier, quick):
        if device.index == 1:
            raise MemoryError("nothing to lock")
        return two_gpus(device, barrier, quick)

    monkeypatch.setattr(pcie, "_measure", fails)
    with pytest.raises(MemoryError, match="nothing to lock"):
        pcie.measure_pcie(TWO, quick=True, watcher=Watcher())


def test_overlap_with_everything_but_the_device(no_gpu, monkeypatch, small):
    monkeypatch.setattr(overlap, "_lane", lambda device: CudaLane(CPU))
    monkeypatch.setattr(overlap, "_QUICK_TOKENS", {"cuda": (64,)})
    monkeypatch.setattr(overlap, "_QUICK_CONTEXTS", {"cuda": (0, 64)})
    operands = Operands("cpu")
    operands.device = "cuda"
    found = measure_overlap(operands, small, directory=None, quick=True, watcher=Watcher())
    assert found.where == "to page-locked host memory"
    assert [point.context for point in found.points] == [0, 64]
    assert all(point.copy_s > 0 < point.compute_s for point in found.points)
    assert not no_gpu.locked


@on_gpu
def test_a_real_link():
    watcher = Watcher()
    found = pcie.measure_pcie([torch.device("cuda", 0)], quick=True, watcher=watcher)
    assert measured_by(watcher)
    planned = found.planned
    assert min(planned.out_bytes_per_s, planned.back_bytes_per_s) > 1e9


@on_gpu
def test_a_real_layer_and_a_real_link():
    layer = measured_layer("cuda", None)
    found = measure_overlap(Operands("cuda"), layer, directory=None, quick=True, watcher=Watcher())
    assert all(point.copy_s > 0 < point.compute_s for point in found.points)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_real_links_at_once():
    found = pcie.measure_pcie(TWO, quick=True, watcher=Watcher())
    assert found.where.endswith("the slowest of 2 GPUs at once")
    assert min(found.planned.out_bytes_per_s, found.planned.back_bytes_per_s) > 1e9
