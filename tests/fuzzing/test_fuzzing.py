"""Damaged input ends in success or in a documented error; scripts/fuzz.py runs longer campaigns."""

from __future__ import annotations

import pytest

from tests.fuzzing import harness
from tests.fuzzing.harness import run_case
from tests.fuzzing.targets import TARGETS

COUNTS = {"options": 30, "run_files": 30, "checkpoints": 60}
USUAL_COUNT = 120


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_is_refused_as_documented(target, tmp_path):
    for seed in range(COUNTS.get(target, USUAL_COUNT)):
        finding = run_case(target, TARGETS[target], seed=seed, directory=tmp_path)
        assert finding is None, f"scripts/fuzz.py --target {target} --seed {seed}: {finding.what}"


def spin(rng, directory):
    while True:
        pass


def refuse(error):
    def case(rng, directory):
        raise error

    return case


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (refuse(TypeError("x")), "TypeError is no documented error"),
        (refuse(UnicodeDecodeError("utf-8", b"", 0, 1, "x")), "UnicodeDecodeError is no"),
        (refuse(ValueError("")), "without a message"),
        (refuse(ValueError("a\x1b[31m")), "with control characters"),
        (refuse(ValueError("x" * 5000)), "a message of 5000 characters"),
        (spin, "CaseHangError is no documented error"),
    ],
)
def test_what_is_not_documented_is_found(case, says, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "CPU_SECONDS", 0.2)
    finding = run_case("a target", case, seed=0, directory=tmp_path)
    assert finding is not None
    assert says in finding.what
    assert (
        run_case("a target", refuse(ValueError("a.json: no")), seed=0, directory=tmp_path) is None
    )
