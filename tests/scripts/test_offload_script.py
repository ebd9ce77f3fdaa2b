"""Comparison of retained with offloaded activations, at a minimal size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "offload_cpu.py"


@pytest.mark.exhaustive
def test_both_sides_take_turns_and_agree(tmp_path):
    words = ["--length", "512", "--subsequences", "4", "--steps", "1", "--threads", "1"]
    files = ["--output", "found.json", "--picture", "memory.png", "--disk", "."]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words, *files],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "losses equal" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["same_loss"]
    retained, offloaded = found["sides"]["retain"], found["sides"]["offload"]
    assert retained["out_bytes"] == 0 < offloaded["out_bytes"]
    assert offloaded["out_bytes_per_s"] > 0 < offloaded["back_bytes_per_s"]
    assert offloaded["predicted_peak_bytes"] < retained["predicted_peak_bytes"]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"found.json", "memory.png"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--disk", "absent"], "--disk absent: there is no such directory"),
        (["--steps", "0"], "--steps: 0 is too small; write a number from 1 on"),
    ],
)
def test_bad_options_are_refused(tmp_path, words, message):
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
