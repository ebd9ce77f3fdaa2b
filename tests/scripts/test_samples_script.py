"""scripts/compare_samples.py: both sides train on the same documents, in turns."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unpainted import unpainted

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/compare_samples.py"


def call(*words):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=300
    )


def test_both_sides_go_on_in_turns(tmp_path, monkeypatch):
    """In this process, with a smaller model and shorter documents."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module("compare_samples")
    longest = 400
    monkeypatch.setattr(script, "LONGEST", longest)
    monkeypatch.setattr(script, "MODEL", {"preset": "tiny-test"})
    monkeypatch.setitem(script.SIDES["samples"]["sequence"], "length", longest)
    out = tmp_path / "out.json"
    words = ["--samples", 60, "--row", 512, "--turns", 2, "--steps", 2, "--output", out]
    monkeypatch.setattr(sys, "argv", list(map(str, [SCRIPT, tmp_path / "runs", *words])))
    with unpainted():
        script.main()
    report = json.loads(out.read_text())
    samples, rows = report["sides"]["samples"], report["sides"]["rows"]
    assert report["num_samples"] == 60
    assert report["ratio"] == samples["tokens_per_s"] / rows["tokens_per_s"]
    assert rows["tokens"] == [512, 512]
    assert all(0 < tokens <= 512 for tokens in samples["tokens"])
    assert len(samples["planning_wait_s"]) == 2
    lengths = np.diff(np.load(tmp_path / "runs/tokens/documents.npy"))
    assert (lengths.min(), lengths.max()) > (9, 0)
    inputs = lengths - 1  # the last token of a sample is a label only
    assert report["pairs_per_token"]["samples"] == pytest.approx(
        sum(n * (n + 1) / 2 for n in inputs.tolist()) / inputs.sum()
    )


def test_rows_hold_the_longest_document(tmp_path):
    done = call(tmp_path, "--row", 100)
    assert done.returncode == 2
    assert "a row holds the longest document, 8000 tokens" in done.stderr
