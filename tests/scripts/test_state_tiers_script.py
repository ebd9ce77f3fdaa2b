"""Comparison of training state in memory and on a disk, at a minimal size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_the_two_trainings_take_turns_and_agree(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "scripts/compare_state_tiers.py"), str(tmp_path / "runs")]
    command += ["--length", "256", "--turns", "1", "--output", str(report)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["losses_equal"]
    here, there = found["sides"]["in memory"], found["sides"]["on a disk"]
    for bucket in ("weights", "gradients", "optimizer"):
        assert there[bucket] < here[bucket] / 2
    assert not list((tmp_path / "runs" / "tier").iterdir())
