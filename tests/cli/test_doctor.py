"""``sppo doctor``: findings on this machine, and on machines that lack something."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sppo.cli import doctor
from sppo.kernels.native.cpu_allocator import describe_cpu_allocator
from tests.conftest import succeed


def found(findings, name):
    return next(finding for finding in findings if finding.name == name)


def test_says_what_is_there():
    findings = doctor.examine()
    assert {finding.state for finding in findings} <= {"ok", "note", "missing", "broken"}
    assert found(findings, "torch").found.startswith(torch.__version__)
    assert found(findings, "memory pool").found == describe_cpu_allocator()
    assert found(findings, "cpu_flash").found == "taken by auto for bf16 on cpu"
    assert "sppo bench all" in found(findings, "rates").advice
    for finding in findings:
        if finding.state in ("missing", "broken") and finding.subject != "attention":
            assert finding.advice, finding


def test_what_is_not_installed_is_told_with_its_package(monkeypatch):
    monkeypatch.setattr(doctor, "_OPTIONAL", (("pynvml", "no-such-package", "tells the GPU"),))
    finding = found(doctor._packages(), "pynvml")
    assert finding.advice == "tells the GPU: pip install no-such-package"


@pytest.mark.parametrize("error", ["RuntimeError('half of it')", "SystemExit('half of it')"])
def test_a_broken_package_is_named(monkeypatch, tmp_path, error):
    (tmp_path / "half_of_it.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_OPTIONAL", (("half-of-it", "half-of-it", "nothing"),))
    finding = found(doctor._packages(), "half-of-it")
    assert (finding.state, "half of it" in finding.found) == ("broken", True)
    assert finding.advice == "install it again: pip install --force-reinstall half-of-it"


def test_a_check_that_fails_hides_no_other(monkeypatch):
    def why_not(name, case):
        raise ModuleNotFoundError("No module named 'triton.runtime'", name="triton.runtime")

    monkeypatch.setattr("sppo.kernels.attention.choice.chosen_name", lambda case: "")
    monkeypatch.setattr("sppo.kernels.attention.choice.why_not", why_not)
    findings = doctor.examine()
    assert "'triton.runtime'" in [f for f in findings if f.name == "triton"][-1].found
    assert found(findings, "rates").state == "note"


def test_table_shows_findings_and_advice():
    text = " ".join(succeed("doctor").split())
    assert "cpu_flash taken by auto for bf16 on cpu" in text


@pytest.mark.parametrize(
    ("threads", "advice"),
    [
        ("8", ""),
        ("2", "unset it to train one rank on all 8 cores"),
        ("x", "unset it, or write a number from 1 to 8"),
    ],
)
def test_threads(monkeypatch, threads, advice):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert doctor._threads(8).advice == advice


def test_low_limits_are_told(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    room = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(doctor.os, "statvfs", lambda path: room)
    findings = list(doctor._limits())
    words = {"locked memory": "-l", "open files": "-Hn"}
    for name, option in words.items():
        assert f"ulimit {option}" in found(findings, name).advice
    assert "--shm-size" in found(findings, "shared memory").advice


def test_missing_shared_memory_is_told(tmp_path):
    finding = doctor._shared_memory(tmp_path / "none")
    assert finding.found == f"{tmp_path / 'none'} cannot be read: No such file or directory"
    assert finding.advice.endswith("mount it")


def test_gpus_are_listed(monkeypatch):
    properties = SimpleNamespace(name="H100", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    findings = list(doctor._gpus())
    assert [finding.name for finding in findings] == ["cuda:0", "cuda:1", "NCCL"]
    assert found(findings, "cuda:1").found == "H100, 80.0 GiB, compute capability 9.0"


def test_a_gpu_that_cannot_be_seen_is_told(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "nvidia-smi" in found(list(doctor._gpus()), "CUDA").advice


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("raise AttributeError('half of it')", "half of it"),
        (None, "ulimit -v"),
    ],
)
def test_tells_everything_else_where_torch_cannot_be_loaded(tmp_path, broken, said):
    """In a process of its own: nothing that doctor looks at may import torch by the way."""
    if broken is not None:
        (tmp_path / "torch.py").write_text(broken)
    limit = (
        "" if broken else "import resource; resource.setrlimit(resource.RLIMIT_AS, (600 << 20, -1))"
    )
    code = f"import sys; {limit or 'pass'}; from sppo.cli.app import app; app(['doctor', '--json'])"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(doctor.__file__).parents[2]}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    told = {entry["name"]: entry for entry in json.loads(done.stdout)["findings"]}
    assert {"processor", "open files", "torch", "rates"} <= set(told)
    assert told["torch"]["state"] == "broken"
    assert said in told["torch"]["found"] + told["torch"]["advice"]
