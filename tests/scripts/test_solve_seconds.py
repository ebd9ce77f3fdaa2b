"""Measurement of the solver's time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/solve_seconds.py"


def test_processor_seconds_of_a_request_are_reported(tmp_path):
    output = tmp_path / "seconds.json"
    words = ("--turns", "1", "--only", "gpt-7b 1Mi", "--output", output)
    subprocess.run([sys.executable, SCRIPT, *words], check=True, capture_output=True)
    (row,) = json.loads(output.read_text())["requests"]
    (turn,) = row["turns"]
    assert row["request"] == "gpt-7b 1Mi, 32 a100-80g"
    assert row["processor_s"] == turn["processor_s"] > 0.1
    assert 0 < turn["least_loop_s"] <= turn["loop_s"]
    assert row["core_speed"] == turn["least_loop_s"] / turn["loop_s"]
    assert row["at_full_speed_s"] == pytest.approx(row["processor_s"] * row["core_speed"])


def test_a_title_that_does_not_exist_is_refused():
    said = subprocess.run(
        [sys.executable, SCRIPT, "--only", "no such model"], capture_output=True, text=True
    )
    assert said.returncode == 2
    assert "--only no such model: in no title of llama-3.1-70b 4Mi, 1024 h100;" in said.stderr
