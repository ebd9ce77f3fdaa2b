"""``sppo bench``: the file, the JSON, and requests refused before any measurement."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sppo.bench import disk, suite
from sppo.bench.overlap import measured_layer
from sppo.cli import bench_tables
from sppo.hardware import this_machine
from sppo.hardware.file import hardware_json, read_hardware
from sppo.hardware.presets import PRESETS
from sppo.hardware.this_machine import detect_machine
from sppo.offload.disk.disk_room import DiskRoom
from tests.bench.test_copies import DISK
from tests.bench.test_hardware_description import EVERYTHING, GEMM, NOTHING
from tests.bench.test_overlap import OVERLAP
from tests.conftest import call, refuse, succeed, tree, write_run

SUBJECTS = ("gemm", "attention", "elementwise", "rule", "messages", "pcie", "overlap")


@pytest.fixture
def measured(monkeypatch):
    """What was asked of the benchmarks, which answer at once."""
    asked = []

    def measure(subjects, request, *, watcher):
        assert request.device == "cpu"
        asked.append((tuple(subjects), tuple(request.dtypes), request.quick))
        watcher.begin(subjects[0], total=1)
        watcher.advance()
        if len(subjects) > 1:
            return replace(EVERYTHING, copies=(DISK,), overlap=OVERLAP)
        return replace(NOTHING, gemm=GEMM)

    monkeypatch.setattr(suite, "measure", measure)
    monkeypatch.setattr(suite, "device_to_measure", lambda: "cpu")
    return asked


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_real_measurement_is_read_back_by_plans(tmp_path):
    write_run(tmp_path / "run.yaml")
    text = succeed("bench", "gemm", "--quick", "--run", "run.yaml", "-o", "hardware.json")
    assert "written hardware.json" in text
    assert "hardware: {file: hardware.json}" in text
    spec = read_hardware_here()
    assert spec.name == detect_machine().name
    assert {point.dtype for point in spec.device.gemm_points} == {"fp32"}
    assert spec.provenance == "calibrated"


def read_hardware_here():
    from pathlib import Path

    return read_hardware(Path("hardware.json"))


def test_all_is_every_subject_in_every_precision(measured):
    text = succeed("bench", "all", "-o", "hardware.json")
    assert measured == [(SUBJECTS, ("bf16", "fp32"), False)]
    assert read_hardware_here().provenance == "measured"
    assert "measuring gemm: 1 timings" in text
    for heading in (
        "Linear layers",
        "Attention of 4/2 heads over visible pairs",
        "Element-wise kernels",
    ):
        assert heading in text


def test_json_is_one_object_and_nothing_else(measured, tmp_path):
    result = call("bench", "all", "--quick", "--json")
    assert result.exit_code == 0
    assert measured == [(SUBJECTS, ("bf16", "fp32"), True)]
    report = json.loads(result.stdout)
    assert report["hardware"]["provenance"] == "measured"
    assert report["copies"][0]["planned"]["request_bytes"] == 16 << 20
    assert report["overlap"]["points"][0]["tokens"] == 256
    assert report["hardware"]["device"]["gemm_points"][0]["tokens"] == 512
    assert (report["output"], report["worst_spread"]) == (None, 0.1)
    backends = [{"dtype": "bf16", "head_size": 64, "backend": "cpu_flash"}]
    assert report["attention_backends"] == backends
    assert tree(tmp_path) == {}


def test_unsteady_figures_are_doubted_where_they_are_written(measured, monkeypatch):
    monkeypatch.setattr(bench_tables, "_STEADY", 0.05)
    text = succeed("bench", "all", "-o", "hardware.json")
    assert "half of the timings lay more than 10% apart" in text
    assert "written hardware.json, with the unsteady figures above" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "absent/hardware.json"], "-o absent/hardware.json: there is no directory absent"),
        (["-o", "notes.txt"], "hardware file notes.txt: "),
        (["-o", "other.json"], "other.json describes 'h100' and this machine is "),
    ],
)
def test_bad_requests_are_refused_before_anything_is_measured(measured, tmp_path, words, message):
    (tmp_path / "notes.txt").write_text("important")
    (tmp_path / "other.json").write_text(json.dumps(hardware_json(PRESETS["h100"])))
    before = tree(tmp_path)
    assert message in " ".join(refuse("bench", "gemm", *words).split())
    assert measured == []
    assert tree(tmp_path) == before


def test_what_no_measured_subject_uses_is_refused(measured):
    message = refuse("bench", "messages", "--run", "run.yaml")
    assert (
        "--run run.yaml: only sppo bench gemm, attention, elementwise, rule, pcie, overlap"
        in message
    )
    message = refuse("bench", "attention", "--disk", "absent")
    assert "--disk absent: only sppo bench pcie, overlap and all use it; leave it" in message
    assert measured == []


def test_a_gpu_that_cannot_be_asked_what_it_is_is_refused(measured, monkeypatch):
    monkeypatch.setattr(suite, "device_to_measure", lambda: "cuda")
    monkeypatch.setattr(this_machine, "find_gpus", lambda: None)
    assert "pip install nvidia-ml-py" in refuse("bench", "all")
    assert measured == []


def test_copies_go_where_they_are_told(monkeypatch, tmp_path):
    setups = []

    def measure(subjects, request, *, watcher):
        setups.append(request)
        return replace(NOTHING, copies=(DISK,), overlap=OVERLAP)

    monkeypatch.setattr(suite, "measure", measure)
    write_run(tmp_path / "run.yaml", activations={"disk": "fast"})
    (tmp_path / "fast").mkdir()
    (tmp_path / "slow").mkdir()
    succeed("bench", "pcie", "--quick")
    succeed("bench", "overlap", "--quick", "--run", "run.yaml")
    text = succeed("bench", "all", "--run", "run.yaml", "--disk", "slow")
    assert [str(setup.directory) for setup in setups] == [".", "fast", "slow"]
    assert [setup.dtypes for setup in setups] == [("bf16", "fp32"), ("fp32",), ("fp32",)]
    layers = [measured_layer("cpu", setup.run) for setup in setups]
    assert [layer.model.vocab_size for layer in layers] == [257, 32, 32]
    for words in ("write or read alone", "both at once: 0.00 GB/s out"):
        assert words in text


def test_no_room_on_the_disk_is_told_before_anything_is_measured(measured, monkeypatch):
    monkeypatch.setattr(disk, "disk_room", lambda path: DiskRoom(free_bytes=1 << 20))
    assert "takes 1.0 GiB in .: 1.0 MiB are free there" in refuse("bench", "all", code=4)
    assert "no such directory" in refuse("bench", "pcie", "--disk", "absent")
    assert measured == []
