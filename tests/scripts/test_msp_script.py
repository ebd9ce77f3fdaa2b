"""Comparison with and without multiplexed sequence partitioning, at a minimal size."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_both_sides_take_turns_and_agree(tmp_path):
    report = tmp_path / "report.json"
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts/compare_msp.py"),
            *("--length", "512", "--steps", "1"),
            *("--output", str(report), "--plot", str(tmp_path / "steps.png")),
        ],
        check=True,
        capture_output=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = json.loads(report.read_text())
    assert found["loss_difference"] < 1e-4
    assert 0.75 < found["ideal"] < 0.85  # (4 - 1/4) / (4 + 1), attention balanced
    assert found["step_s"].keys() == {"off", "on"}
    assert (tmp_path / "steps.png").stat().st_size > 10_000
