import json
from dataclasses import replace

import numpy as np
import pytest

from sppo.config.run import HardwareConfig
from sppo.hardware.description import HOST_FRACTION
from sppo.hardware.file import hardware_json, read_hardware
from sppo.hardware.presets import PRESETS
from sppo.hardware.run_hardware import hardware_for, hardware_line
from sppo.units import GIB

ATTENTION_POINT = {
    "dtype": "bf16", "head_size": 64, "queries": 64, "keys": 64,
    "forward_flops_per_s": 1e12, "backward_flops_per_s": 1e12,
}  # fmt: skip
PROMISED = ("a100-40g", "a100-80g", "a800", "a800-40g", "b200", "h100", "h200", "laptop-cpu")


def test_every_promised_preset_says_that_it_is_analytic():
    assert tuple(PRESETS) == PROMISED
    assert {spec.provenance for spec in PRESETS.values()} == {"analytic"}
    assert PRESETS["a100-80g"].device.memory_bytes == 80 * GIB
    assert 75 * GIB < PRESETS["a100-80g"].device.usable_bytes < 80 * GIB


@pytest.mark.parametrize(
    ("name", "provenance", "shown"),
    [
        ("h100", "analytic", "h100 (analytic)"),
        ("a CPU, 2 cores (preset laptop-cpu)", "analytic", "a CPU, 2 cores (preset laptop-cpu)"),
        ("a CPU, 2 cores (preset laptop-cpu)", "measured", "a CPU, 2 cores (measured)"),
        ("1 x T4 (unknown, nearest by memory: a100-40g)", "calibrated", "1 x T4 (calibrated)"),
        ("rack (east)", "measured", "rack (east) (measured)"),
    ],
)
def test_rates_are_said_to_be_of_a_preset_or_measured(name, provenance, shown):
    spec = replace(PRESETS["h100"], name=name, provenance=provenance)
    assert spec.name_and_origin == shown
    assert ("preset" in hardware_line(spec)) == ("preset" in shown)


def test_a_run_names_a_preset_and_its_size():
    spec = hardware_for(HardwareConfig(preset="h100", nodes=4, devices_per_node=4))
    assert (spec.name, spec.num_devices) == ("h100", 16)
    assert spec.host_bytes_per_device == spec.node.host_memory_bytes // 4
    with pytest.raises(ValueError, match="'h20' is not one of a100-40g.* Did you mean 'h200'"):
        hardware_for(HardwareConfig(preset="h20"))


def test_auto_is_this_machine_where_it_is_known():
    ours = replace(PRESETS["h200"], name="ours")
    assert hardware_for("auto").name == "laptop-cpu"
    assert hardware_for("auto", this_machine=ours).name == "ours"
    two = hardware_for(HardwareConfig(nodes=2), this_machine=ours)
    assert (two.name, two.num_nodes) == ("ours", 2)


@pytest.mark.parametrize(("written", "margin"), [({}, 0.03), ({"margin": 0.1}, 0.1)])
def test_plans_leave_a_margin_of_a_devices_memory_free(written, margin):
    device = PRESETS["h100"].device
    spec = hardware_for(HardwareConfig(preset="h100", **written))
    assert spec.device.usable_bytes == device.usable_bytes - round(margin * device.memory_bytes)
    assert spec.device.memory_bytes == device.memory_bytes
    ours = hardware_for("auto", this_machine=PRESETS["h100"]).device.usable_bytes
    assert ours == device.usable_bytes - round(0.03 * device.memory_bytes)


def test_plans_fill_as_much_of_the_host_as_training_takes(tmp_path):
    h200, path = PRESETS["h200"], tmp_path / "hardware.json"
    path.write_text(json.dumps(hardware_json(h200)), encoding="utf-8")
    every_way = (
        "auto",
        HardwareConfig(),
        HardwareConfig(preset="h200"),
        HardwareConfig(file=str(path)),
    )
    for config in every_way:
        node = hardware_for(config, this_machine=h200).node
        assert node.host_memory_bytes == int(h200.node.host_memory_bytes * HOST_FRACTION)


def test_a_run_says_how_much_host_memory_its_nodes_have():
    spec = hardware_for(HardwareConfig(preset="h100", host_memory="1TiB", devices_per_node=4))
    assert spec.host_bytes_per_device == int(1024 * GIB * HOST_FRACTION) // 4
    with pytest.raises(ValueError, match="laptop-cpu is its device's, there is none behind it"):
        hardware_for(HardwareConfig(preset="laptop-cpu", host_memory="1TiB"))


def test_a_measured_machine_is_read_back(tmp_path):
    path = tmp_path / "hardware.json"
    node = replace(PRESETS["h200"].node, d2h_bytes_per_s=5e10)
    spec = replace(PRESETS["h200"], name="ours", provenance="measured", node=node)
    path.write_text(json.dumps(hardware_json(spec)), encoding="utf-8")
    assert read_hardware(path) == spec
    planned = hardware_for(HardwareConfig(file=str(path), margin=0))
    assert replace(planned, node=spec.node) == spec
    assert hardware_for(HardwareConfig(file=str(path), nodes=3)).num_nodes == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: "{", "not JSON"),
        (lambda values: [1], "file: "),
        (lambda values: {**values, "speed": 3}, "speed: Unexpected"),
        (lambda values: {k: v for k, v in values.items() if k != "node"}, "node: .*required"),
    ],
)
def test_a_file_that_describes_no_machine_is_refused(tmp_path, change, message):
    path = tmp_path / "hardware.json"
    changed = change(hardware_json(PRESETS["h100"]))
    text = changed if isinstance(changed, str) else json.dumps(changed)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_hardware(path)


def test_a_cluster_of_more_devices_than_ranks_is_refused():
    with pytest.raises(ValueError, match=r"131073 nodes x 8 devices are 1048584 devices, and at"):
        replace(PRESETS["h100"], num_nodes=(1 << 17) + 1)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "device",
            {"gemm_efficiency": 2},
            r"gemm_efficiency: .*equal to 1 \(found 2\); sppo bench",
        ),
        ("device", {"bf16_flops_per_s": -1.0}, "bf16_flops_per_s: .*greater than or equal to"),
        ("device", {"memory_bytes": 0}, "device.memory_bytes: .*greater than or equal to 1 "),
        ("device", {"memory_bytes_per_s": 1e-300}, "memory_bytes_per_s: .*greater than or equal"),
        ("device", {"kernel_s": 1e9}, "kernel_s: .*less than or equal to 3600"),
        (
            "device",
            {"attention_backend": "flash"},
            "attention_backend is 'flash': it is one of c",
        ),
        (
            "device",
            {"attention_points": [{**ATTENTION_POINT, "queries": 0}]},
            r"device.attention_points.0.queries: .*greater than or equal to 1",
        ),
        ("device", {"attention_points": [ATTENTION_POINT] * 4097}, "at most 4096 items"),
        ("node", {"num_devices": 10**12}, "num_devices: .*less than or equal to"),
        ("node", {"d2h_bytes_per_s": 0.0}, "copies of 0 bytes/s to a tier of 21.* bytes: at least"),
        ("node", {"disk_write_bytes_per_s": 1.7e29}, "disk_write_bytes_per_s: .*less than or eq"),
        ("network", {"inter_node_bytes_per_s": float("nan")}, "NaN is not JSON"),
        ("network", {"intra_node_bytes_per_s": True}, "intra_node_bytes_per_s: .*valid number"),
    ],
)
def test_impossible_figures_are_refused(tmp_path, part, change, message):
    path, values = tmp_path / "hardware.json", hardware_json(PRESETS["h100"])
    path.write_text(json.dumps({**values, part: {**values[part], **change}}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_hardware(path)


def test_presets_price_the_back_end_that_runs():
    h100 = hardware_for(HardwareConfig(preset="h100"))
    slower = hardware_for(HardwareConfig(preset="h100", attention="flash_attn_2"))
    ask = {"queries": np.array([8192.0]), "keys": np.array([65536.0]), "heads": 32}
    cudnn, flash = (spec.device.attention_flops_per_s("bf16", **ask) for spec in (h100, slower))
    assert 1.7 < float(cudnn[0] / flash[0]) < 2.3
    single = h100.device.attention_flops_per_s("fp32", **ask)
    assert single[0] < h100.device.fp32_flops_per_s


def test_a_back_end_without_figures_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cudnn on a100-80g: .*write one of flash_attn_2"):
        hardware_for(HardwareConfig(preset="a100-80g", attention="cudnn"))
    with pytest.raises(ValueError, match="its rate is not known there; leave the key out$"):
        hardware_for(HardwareConfig(preset="laptop-cpu", attention="cudnn"))
