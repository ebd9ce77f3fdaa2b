"""Comparison of numbers of virtual stages, at a minimal size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compare(*words):
    command = [sys.executable, str(ROOT / "scripts/compare_virtual_stages.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def test_all_orders_take_turns_and_agree(tmp_path):
    report = tmp_path / "report.json"
    done = compare("--length", "512", "--steps", "1", "--output", str(report))
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["loss_difference"] < 1e-4
    orders = found["orders"]
    assert [order["virtual_stages"] for order in orders] == [1, 2, 4, 8]
    planned = [order["planned_idle_share"] for order in orders]
    assert planned == sorted(planned, reverse=True)
    assert all(0 <= order["idle_share"] < 1 for order in orders)


def test_one_stage_is_among_them():
    done = compare("--virtual-stages", "2,4")
    assert done.returncode == 2
    assert "has no 1 to compare with" in done.stderr


@pytest.mark.slow
def test_idle_shares_of_a_longer_sequence(tmp_path):
    """Two ranks idle less the more stages they have, in what is measured, too."""
    report = tmp_path / "report.json"
    done = compare("--length", "8192", "--steps", "3", "--output", str(report))
    assert done.returncode == 0, done.stderr
    idle = {o["virtual_stages"]: o["idle_share"] for o in json.loads(report.read_text())["orders"]}
    assert idle[4] < idle[1] - 0.03
