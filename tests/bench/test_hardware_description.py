"""Measurements become a description: merged, saved, read back."""

import json
from dataclasses import replace

import pytest

from sppo.bench import hardware_description as description
from sppo.bench.attention import AttentionRates, Heads
from sppo.bench.hardware_description import describe, described_machine, starting_description
from sppo.bench.suite import Measurements
from sppo.hardware.file import hardware_json, read_hardware
from sppo.hardware.presets import PRESETS
from sppo.hardware.rates import AttentionPoint, ElementwisePoint, GemmPoint

LAPTOP, GPU = PRESETS["laptop-cpu"], PRESETS["h100"]
NOTHING = Measurements("cpu", spreads=(0.1,), wall_s=1.0)
GEMM = tuple(
    GemmPoint(dtype, 512, width, speed * width, speed * width, speed * width / 2)
    for dtype, speed in (("bf16", 4e8), ("fp32", 1e8))
    for width in (256, 1024)
)
POINTS = (AttentionPoint("bf16", 64, 512, 512, 1e11, 8e10),)
ATTENTION = AttentionRates(Heads(4, 2), {("bf16", 64): "cpu_flash"}, POINTS)
ELEMENTWISE = (
    ElementwisePoint("copy", "bf16", 1 << 16, 9e10),
    ElementwisePoint("copy", "bf16", 1 << 22, 2e10),
    ElementwisePoint("copy", "fp32", 1 << 22, 2.1e10),
    ElementwisePoint("swiglu", "bf16", 1 << 22, 1e9),
)
EVERYTHING = replace(NOTHING, gemm=GEMM, attention=ATTENTION, elementwise=ELEMENTWISE)


def test_all_subjects_make_a_measured_machine(tmp_path):
    spec = describe(LAPTOP, EVERYTHING)
    assert spec.provenance == "measured"
    assert spec.device.gemm_points == GEMM
    assert (spec.node, spec.network, spec.name) == (LAPTOP.node, LAPTOP.network, LAPTOP.name)
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(hardware_json(spec)), encoding="utf-8")
    assert read_hardware(path) == spec


def test_the_peak_of_a_cpu_is_what_its_best_product_reaches():
    device = describe(LAPTOP, EVERYTHING).device
    assert device.bf16_flops_per_s == pytest.approx(4e8 * 1024)
    assert device.fp32_flops_per_s == pytest.approx(1e8 * 1024)
    assert device.gemm_efficiency == 1.0
    assert device.attention_efficiency == pytest.approx(1e11 / (4e8 * 1024))
    assert device.attention_backward_efficiency == pytest.approx(8e10 / (4e8 * 1024))


def test_a_dtype_that_was_not_measured_keeps_what_it_reached():
    bf16 = replace(NOTHING, gemm=tuple(p for p in GEMM if p.dtype == "bf16"))
    device, before = describe(LAPTOP, bf16).device, LAPTOP.device
    assert device.fp32_flops_per_s * device.gemm_efficiency == pytest.approx(
        before.fp32_flops_per_s * before.gemm_efficiency
    )


def test_the_peak_of_a_gpu_is_the_vendors():
    attention = replace(ATTENTION, backends={("bf16", 64): "flash_attn_3"})
    device = describe(GPU, replace(EVERYTHING, device="cuda", attention=attention)).device
    assert device.attention_points == POINTS
    assert device.attention_backend == "flash_attn_3"  # whose rates were measured
    assert device.bf16_flops_per_s == GPU.device.bf16_flops_per_s
    assert device.gemm_efficiency == pytest.approx(4e8 * 1024 / GPU.device.bf16_flops_per_s)


def test_bandwidth_is_that_of_the_largest_copy():
    assert describe(LAPTOP, EVERYTHING).device.memory_bytes_per_s == 2.1e10
    without = describe(LAPTOP, replace(EVERYTHING, elementwise=())).device
    assert without.memory_bytes_per_s == LAPTOP.device.memory_bytes_per_s


def test_subjects_are_added_one_after_the_other():
    spec = describe(LAPTOP, replace(NOTHING, gemm=GEMM))
    assert spec.provenance == "calibrated"
    spec = describe(spec, replace(NOTHING, attention=ATTENTION))
    assert (spec.provenance, spec.device.gemm_points) == ("calibrated", GEMM)
    spec = describe(spec, replace(NOTHING, elementwise=ELEMENTWISE))
    assert spec.provenance == "measured"


def test_measuring_again_replaces_a_dtype_whole():
    first = describe(LAPTOP, EVERYTHING)
    again = (GemmPoint("fp32", 64, 64, 1e9, 1e9, 1e9),)
    points = describe(first, replace(NOTHING, gemm=again)).device.gemm_points
    assert [p for p in points if p.dtype == "fp32"] == list(again)
    assert [p for p in points if p.dtype == "bf16"] == [p for p in GEMM if p.dtype == "bf16"]


def test_a_file_of_this_machine_is_the_start(tmp_path):
    path = tmp_path / "hardware.json"
    assert starting_description(LAPTOP, path=None) is LAPTOP
    assert starting_description(LAPTOP, path=path) is LAPTOP
    edited = replace(LAPTOP, node=replace(LAPTOP.node, disk_bytes=5))
    path.write_text(json.dumps(hardware_json(edited)), encoding="utf-8")
    assert starting_description(LAPTOP, path=path) == edited


def test_rates_of_other_threads_are_left_alone(tmp_path):
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(hardware_json(LAPTOP)), encoding="utf-8")
    threads = LAPTOP.device.num_multiprocessors
    here = replace(LAPTOP, device=replace(LAPTOP.device, num_multiprocessors=threads + 1))
    with pytest.raises(ValueError, match=f"holds rates of {threads} threads and torch has"):
        starting_description(here, path=path)


def test_a_cpu_is_described_with_the_threads_that_torch_has(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    assert described_machine("cpu").device.num_multiprocessors == 3


def test_a_file_of_another_machine_is_left_alone(tmp_path):
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(hardware_json(GPU)), encoding="utf-8")
    with pytest.raises(ValueError, match="describes 'h100' and this machine is 'laptop-cpu': "):
        starting_description(LAPTOP, path=path)
    path.write_text("important notes", encoding="utf-8")
    with pytest.raises(ValueError, match="sppo bench all -o FILE writes a good one"):
        starting_description(LAPTOP, path=path)


def test_the_machine_is_described_with_the_device_that_is_measured(monkeypatch):
    monkeypatch.setattr(description, "detect_machine", lambda: GPU)
    assert described_machine("cuda") is GPU
    assert described_machine("cpu").device.kind == "cpu"
    monkeypatch.setattr(description, "detect_machine", lambda: LAPTOP)
    monkeypatch.setattr("torch.get_num_threads", lambda: LAPTOP.device.num_multiprocessors)
    assert described_machine("cpu") == LAPTOP
    with pytest.raises(ValueError, match="pip install nvidia-ml-py, or hide the GPU"):
        described_machine("cuda")
