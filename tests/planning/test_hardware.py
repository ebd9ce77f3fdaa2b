from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from sppo.config.run import HardwareConfig
from sppo.planning.hardware import PRESETS, hardware_for, read_hardware
from sppo.units import GIB

PROMISED = ("a100-40g", "a100-80g", "a800", "h100", "h200", "b200", "laptop-cpu")


def test_every_promised_preset_says_that_it_is_analytic():
    assert tuple(PRESETS) == PROMISED
    assert {spec.provenance for spec in PRESETS.values()} == {"analytic"}
    assert PRESETS["a100-80g"].device_memory_bytes == 80 * GIB


def test_a_run_names_a_preset_and_its_size():
    spec = hardware_for(HardwareConfig(preset="h100", nodes=4, devices_per_node=4))
    assert (spec.name, spec.num_devices) == ("h100", 16)
    assert hardware_for("auto").name == "laptop-cpu"
    with pytest.raises(ValueError, match="'h900' is not one of a100-40g"):
        hardware_for(HardwareConfig(preset="h900"))


def test_a_measured_machine_is_read_back(tmp_path):
    path = tmp_path / "hardware.json"
    spec = replace(PRESETS["h200"], name="ours", provenance="measured", d2h_bytes_per_s=5e10)
    path.write_text(json.dumps(asdict(spec)), encoding="utf-8")
    assert read_hardware(path) == spec
    assert hardware_for(HardwareConfig(file=str(path))) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "unknown no object"),
        ('{"speed": 3}', "unknown speed"),
        ('{"name": "x"}', "provenance"),
    ],
)
def test_a_file_that_describes_no_machine_is_refused(tmp_path, text, message):
    path = tmp_path / "hardware.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_hardware(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gemm_efficiency": 1.5}, "gemm_efficiency is 1.5: must be within 0 and 1"),
        ({"bf16_flops_per_s": -1.0}, "bf16_flops_per_s is -1.0: must be at least 0"),
    ],
)
def test_impossible_figures_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PRESETS["h100"], **change)
