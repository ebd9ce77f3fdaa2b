"""Comparison on InfiniPipe's machine: a small case, and the merging of cases in a file."""

from __future__ import annotations

import json
import sys

import pytest

from experiments import infinipipe
from experiments.infinipipe_sides import LAYOUTS, SIDES, Case, planned_sides


def test_all_sides_train_the_same_tokens_in_the_same_memory():
    case = Case("13b", "github", 49152, "paper", samples=64, steps=1)
    found = planned_sides(case, list(SIDES))
    assert {name for name, side in found.items() if isinstance(side, str)} <= {"retained"}
    plans = {name: side.steps[0].plan for name, side in found.items() if not isinstance(side, str)}
    for name, plan in plans.items():
        candidate = plan.evaluated.candidate
        assert plan.tokens == sum(case.lengths[0])
        assert plan.evaluated.degrees == LAYOUTS["paper"][0]
        assert plan.device_peak_bytes <= candidate.budget_bytes
        assert candidate.state.optimizer == "device"
        assert not plan.evaluated.placement.offloaded.any()
        assert bool(found[name].chunk_s) == name.startswith(("fixed", "unbalanced"))
        figures = infinipipe.figures(found[name], case)
        assert sum(figures["parts_s"].values()) == pytest.approx(plan.step_s)
        assert figures["tokens_per_s"] == pytest.approx(plan.tokens / plan.step_s)
    for name in {*plans} - {"elastic"}:
        assert plans["elastic"].step_s <= 1.01 * plans[name].step_s, name
    for name in ("fixed_recomputed", "recomputed"):
        assert (plans[name].evaluated.placement.recomputed[:, :, 1:] > 0).all()


def test_cases_of_several_runs_come_together(tmp_path, monkeypatch):
    output = tmp_path / "report.json"
    words = "--models 7b --samples 8 --steps 1 --longest 8Ki --layouts own --sides fixed,elastic"
    for distribution in ("magi", "github", "magi"):
        own = ["--distributions", distribution, "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["infinipipe", *words.split(), *own])
        infinipipe.main()
    report = json.loads(output.read_text())
    assert report["provenance"] == "simulated"
    assert [case["distribution"] for case in report["cases"]] == ["github", "magi"]
    for case in report["cases"]:
        assert case["sides"]["fixed"]["over_seq1f1b"] == 1
        assert case["sides"]["elastic"]["over_seq1f1b"] > 0.98
