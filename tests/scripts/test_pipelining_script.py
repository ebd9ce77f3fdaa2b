"""Comparison with torch's pipelining, at a minimal size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_pipelining.py"


def test_both_sides_compute_the_same(tmp_path):
    words = ["--length", "128", "--subsequences", "2", "--sequences", "2", "--output", "found.json"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "sppo / torch: tokens/s" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    (case,) = found["cases"]
    ours, theirs = case["sides"]
    assert theirs["schedule"] == "1F1B"
    assert len(case["boundaries"]) == 3
    assert case["largest_difference"] < 0.02
    assert case["speedup"] > 0
    assert min(ours["peak_bytes"] + theirs["peak_bytes"]) > 0
    assert 0 < ours["bubble_fraction"] < 1
    assert {path.name for path in tmp_path.iterdir()} == {"found.json"}
