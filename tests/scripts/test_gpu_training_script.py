"""The training part of the GPU check, rehearsed on the CPU with models that take a moment."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_the_rehearsal_fills_the_report(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gpu_training.py", "report.json"]
        + ["--directory", ".", "--rehearse", "--seconds", "200"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (tmp_path / "report.json").exists(), done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["failed"] == []
    assert done.returncode == 0, done.stderr
    (compared,) = found["cases"]
    assert compared["largest_difference"] == 0.0
    runs = compared["runs"]
    assert list(runs) == ["retain", "offload_all"]
    assert runs["retain"]["memory_bytes"]["weights"]["measured"] > 0
    assert min(run["over_least_step_s"] for run in runs.values()) == 1.0
    assert runs["offload_all"]["copies"]["exposed_s"]["measured"] >= 0
    (beside,) = found["transformers"]
    assert beside["step_s"] > 0
    assert len(beside["loss"]) == 2


@pytest.fixture
def gpu_training(monkeypatch, tmp_path):
    """The script as a module, in an empty directory, where transformers is not installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the commands that it starts
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("gpu_training")
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    return script


def test_absent_transformers_are_left_out_in_words(gpu_training, capsys, tmp_path):
    case = gpu_training.Case("1b 64Ki", {"preset": "llama-3.2-1b"}, 65536, 8, "bf16", 3)
    place = gpu_training.Place(tmp_path, rehearse=False)
    found = gpu_training.transformers_beside(case, place, timeout_s=1)
    reason = f"transformers is not installed for {sys.executable}"
    assert found == {"case": "1b 64Ki", "left_out": reason}
    assert reason in capsys.readouterr().out
