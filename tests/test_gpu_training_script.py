"""The training part of the GPU check, rehearsed on the CPU with models that take a moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
    (compared,) = found["losses"]
    assert compared["largest_difference"] == {"cpu and gpu": 0.0, "kept and moved": 0.0}
    assert compared["same_bits_kept_and_moved"]
    assert [row["run"] for row in found["memory"]] == ["gpu retain", "gpu offload_all"]
    assert found["memory"][0]["memory_bytes"]["weights"]["measured"] > 0
    (times,) = found["times"]
    assert times["step_time_ratio"] > 0
    assert times["copies"]["exposed_s"]["measured"] >= 0


def test_what_fails_is_in_the_report_with_its_words(tmp_path):
    (tmp_path / "runs").write_text("no directory")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gpu_training.py", "report.json"]
        + ["--directory", ".", "--rehearse", "--seconds", "100"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    (failed,) = json.loads((tmp_path / "report.json").read_text())["failed"]
    assert failed["case"] == "rehearsal"
    assert "runs is a file, not a directory" in failed["why"]
