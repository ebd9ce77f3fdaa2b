"""Detection of the machine: with a fake driver, and on the machine that runs the tests."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from sppo.hardware import this_machine
from sppo.hardware.presets import PRESETS
from sppo.hardware.this_machine import (
    count_numa_nodes,
    cpu_model,
    describe_gpus,
    detect_machine,
    divide_cpu,
    find_gpus,
    threads_of_rank,
)
from sppo.units import GIB


def driver(*names, memory_gib=80, fails=None):
    """A pynvml that knows these GPUs, and whose call ``fails``."""
    module = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def answer(name, value):
        def call(*asked):
            module.calls.append(name)
            if name == fails:
                raise NVMLError(name)
            try:
                return value(*asked) if callable(value) else value
            except ValueError:
                raise NVMLError(name) from None

        return call

    module.calls = []
    module.NVMLError = NVMLError
    uuids = ["GPU-3f2a91", "GPU-77b0c4", "MIG-5d10e8"]  # the last one an instance of the others

    def memory(handle):
        return SimpleNamespace(total=int(memory_gib * GIB) >> (3 if handle == 2 else 0))

    for name, value in {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": len(names),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": uuids.index,
        "nvmlDeviceGetUUID": lambda handle: uuids[handle],
        "nvmlDeviceGetName": lambda handle: (*names, "a part")[handle],
        "nvmlDeviceGetMemoryInfo": memory,
    }.items():
        setattr(module, name, answer(name, value))
    return module


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(this_machine, "find_gpus", lambda: None)


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80g"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80g"),
        ("NVIDIA A800-SXM4-40GB", 40, "a800-40g"),
        ("NVIDIA A800-SXM4-80GB", 80, "a800"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100"),
        ("NVIDIA H200", 140.4, "h200"),
        ("NVIDIA B200", 179, "b200"),
    ],
)
def test_a_gpu_is_matched_by_name_and_memory(monkeypatch, name, gib, preset):
    monkeypatch.setitem(sys.modules, "pynvml", driver(name, name, memory_gib=gib))
    spec = detect_machine()
    assert (spec.provenance, spec.num_nodes, spec.node.num_devices) == ("analytic", 1, 2)
    assert spec.name.startswith("2 x NVIDIA ")
    assert spec.name.endswith(f" (preset {preset})")
    assert spec.device.memory_bytes == int(gib * GIB)
    assert spec.device.bf16_flops_per_s == PRESETS[preset].device.bf16_flops_per_s
    assert spec.node.d2h_bytes_per_s == PRESETS[preset].node.d2h_bytes_per_s
    assert 0 < spec.node.host_memory_bytes <= psutil.virtual_memory().total
    assert spec.node.numa_nodes == count_numa_nodes()


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("NVIDIA L40S", 45, "a100-40g"),
        ("NVIDIA GH200 480GB", 95, "a100-80g"),
        ("NVIDIA GeForce RTX 4090", 24, "a100-40g"),
        ("Rubin", 288, "b200"),
    ],
)
def test_an_unknown_gpu_gives_the_nearest_by_memory_and_says_so(name, gib, preset):
    spec = describe_gpus(name, count=1, memory_bytes=int(gib * GIB), host_bytes=GIB)
    assert spec.name == f"1 x {name} (unknown, nearest by memory: {preset})"
    assert spec.device.memory_bytes == int(gib * GIB)
    assert spec.node.host_memory_bytes == GIB


@pytest.mark.parametrize(
    "module",
    [
        None,
        driver(),
        driver("NVIDIA H200", fails="nvmlInit"),
        driver("NVIDIA H200", fails="nvmlDeviceGetCount"),
        driver("NVIDIA H200", fails="nvmlDeviceGetMemoryInfo"),
    ],
    ids=["no binding", "no GPU", "no driver", "broken driver", "broken GPU"],
)
def test_without_a_gpu_that_answers_the_cpu_is_the_device(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert find_gpus() is None
    assert detect_machine().device.kind == "cpu"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("first", 2, 80)),
        ("1", ("second", 1, 80)),
        ("1,0", ("second", 2, 80)),
        ("0,2,1", ("first", 1, 80)),
        ("1,-1,0", ("second", 1, 80)),
        ("GPU-77b0", ("second", 1, 80)),
        ("GPU-77b0,GPU-3f2a", ("second", 2, 80)),
        ("GPU-,0", None),
        ("MIG-5d10e8", ("a part", 1, 10)),
        ("MIG-0", None),
        ("", None),
        ("NoDevFiles", None),
    ],
)
def test_only_gpus_that_cuda_shows_count(monkeypatch, visible, expected):
    monkeypatch.setitem(sys.modules, "pynvml", driver("first", "second"))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = find_gpus()
    assert (None if gpus is None else (gpus[0], gpus[1], gpus[2] // GIB)) == expected


def test_the_driver_is_always_closed(monkeypatch):
    for module in (driver("NVIDIA H200"), driver("NVIDIA H200", fails="nvmlDeviceGetName")):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        find_gpus()
        assert module.calls[-1] == "nvmlShutdown"


def test_a_cpu_is_described_with_its_own_memory_and_cores(monkeypatch, no_gpu):
    monkeypatch.setattr(this_machine, "count_cores", lambda: 8)
    monkeypatch.setattr(this_machine, "cpu_model", lambda: "Model 7")
    monkeypatch.setattr(this_machine, "usable_memory_bytes", lambda: 3 * GIB)
    spec, preset = detect_machine(), PRESETS["laptop-cpu"]
    assert (spec.name, spec.provenance) == ("Model 7, 8 cores (preset laptop-cpu)", "analytic")
    assert spec.device.memory_bytes == 3 * GIB
    assert 0 < spec.device.usable_bytes < 3 * GIB
    assert spec.device.num_multiprocessors == 8
    assert spec.device.bf16_flops_per_s == 4 * preset.device.bf16_flops_per_s
    assert spec.node.host_memory_bytes == 0
    assert spec.node.num_devices == 1


def test_the_model_of_the_cpu(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(this_machine, "_CPU_INFO", info)
    assert cpu_model()
    info.write_text("processor\t: 0\nmodel name\t: Some  CPU @ 2GHz\nmodel name\t: Other\n")
    assert cpu_model() == "Some CPU @ 2GHz"
    info.write_text("processor\t: 0\n")
    assert cpu_model()


def test_a_limit_below_the_machines_memory_holds(monkeypatch, no_gpu):
    monkeypatch.setattr(this_machine, "control_group_limit_bytes", lambda: 4 * GIB)
    assert detect_machine().device.memory_bytes <= 4 * GIB


@pytest.mark.parametrize(
    ("measured", "ranks", "threads", "cores", "slower"),
    [
        (2, 2, None, None, 2),  # a core each
        (2, 1, None, None, 1),
        (1, 2, 1, 2, 1),  # what one thread reached, each reaches
        (2, 1, 1, 2, 2),  # a process that leaves a core idle
        (1, 1, 2, 2, 1 / 2),
        (1, 2, 1, 1, 2),  # two take turns on one core
        (2, 2, 2, 2, 2),
    ],
)
def test_ranks_compute_with_threads_of_their_own(measured, ranks, threads, cores, slower):
    laptop = PRESETS["laptop-cpu"]
    device = replace(laptop.device, num_multiprocessors=measured)
    divided = divide_cpu(replace(laptop, device=device), ranks, threads=threads, cores=cores)
    assert divided.device.fp32_flops_per_s == pytest.approx(device.fp32_flops_per_s / slower)
    assert divided.device.memory_bytes == device.memory_bytes // ranks
    assert divided.device.num_multiprocessors == (threads or max(1, measured // ranks))


@pytest.mark.parametrize(
    ("given", "threads"), [(None, 2), ("", 2), ("3", 3), ("5,2", 5), ("0", 2), ("many", 2)]
)
def test_threads_of_a_rank_are_those_given_or_its_part_of_the_cores(monkeypatch, given, threads):
    monkeypatch.setattr(this_machine, "count_cores", lambda: 4)
    environ = {} if given is None else {"OMP_NUM_THREADS": given}
    assert threads_of_rank(2, environ=environ) == threads


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("flags\t\t: fpu avx2 avx512bw avx512vl avx512dq avx512f\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512bw\n", False),
        ("model name : of a processor that lists no flags\n", True),
        (None, True),
    ],
)
def test_products_in_half_precision_need_avx512(tmp_path, monkeypatch, text, found):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(this_machine, "_CPU_INFO", path)
    assert this_machine.has_half_products() == found


def test_products_in_half_precision_of_this_machine_are_those_of_torch():
    torch = pytest.importorskip("torch")
    assert this_machine.has_half_products() == torch.ops.mkldnn._is_mkldnn_bf16_supported()
