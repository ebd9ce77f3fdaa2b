"""Comparison of packings of samples: the packing of each side, and a run of minimal size."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sppo.hardware.presets import PRESETS

ROOT = Path(__file__).parents[2]
LENGTHS = (300, 40, 700, 60, 10)


@pytest.fixture
def scripts(monkeypatch):
    """Import a script by name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


def tokens_of(packing):
    """Every token of every sample that a packing has, in order."""
    return sorted(
        (piece.sample, position)
        for pieces in packing.pieces
        for piece in pieces
        for position in range(piece.begin, piece.end)
    )


def every_token():
    return [(sample, at) for sample, tokens in enumerate(LENGTHS) for at in range(tokens)]


def test_sides_are_planned_for_the_same_tokens(scripts):
    sides = scripts("elastic_sides")
    request = sides.Request(
        scripts("compare_elastic").MODEL, "fp32", PRESETS["laptop-cpu"], 1 << 30,
        (LENGTHS, LENGTHS[:3]), longest=1024, row_tokens=1024, chunk_tokens=None,
        memory_share=0.5,
    )  # fmt: skip
    found = sides.side_steps(request, ranks=2, sides=sides.PACKED_SIDES)
    figures = {name: sides.figures(steps, lengths=request.lengths) for name, steps in found.items()}
    assert tuple(figures) == ("padded", "stream", "fixed", "elastic", "elastic_auto")
    for name, steps in found.items():
        assert tokens_of(steps[0].packing) == every_token()
        padding = 5 * 700 - sum(LENGTHS) if name == "padded" else 0
        assert figures[name]["padding_tokens"][0] == padding
    assert {*figures["elastic"]["schedules"]} == {"sppo"}
    assert figures["elastic_auto"]["virtual_stages"] > 1
    for name in ("elastic", "elastic_auto"):
        assert figures[name]["held_bytes"] <= figures["fixed"]["held_bytes"]
    assert figures["padded"]["tokens_per_s"] < figures["fixed"]["tokens_per_s"]
    assert figures["elastic"]["tokens_per_s"] >= 0.98 * figures["fixed"]["tokens_per_s"]
    asked = sides.side_steps(replace(request, chunk_tokens=512), ranks=2, sides=("fixed",))["fixed"]
    assert asked[0].plan.evaluated.candidate.lengths == (410, 512, 188)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_sides_that_recompute_have_the_same_samples_and_memory(scripts, share):
    sides, recomputing = scripts("elastic_sides"), scripts("level_sides").RECOMPUTING_SIDES
    lengths = (3000, 40, 700, 1060, 10, 900, 2000)
    request = sides.Request(
        scripts("compare_elastic").MODEL, "fp32", PRESETS["laptop-cpu"], 1 << 30,
        (lengths,), longest=4096, row_tokens=4096, chunk_tokens=None, memory_share=share,
    )  # fmt: skip
    found = sides.side_steps(request, ranks=2, sides=tuple(recomputing))
    plans = {name: steps[0].plan for name, steps in found.items()}
    budgets = {plan.evaluated.candidate.budget_bytes for plan in plans.values()}
    assert len(budgets) == 1
    assert len({plan.packed for plan in plans.values()}) == 1
    for plan in plans.values():
        assert plan.device_peak_bytes <= max(budgets)
        assert not plan.evaluated.placement.offloaded.any()
    shares = {
        name: sides.figures(steps, lengths=request.lengths)["recomputed_share"][0]
        for name, steps in found.items()
    }
    assert shares["recompute_all"] == 1.0
    assert 0 < shares["levels"] < shares["recompute_uniform"] < 1
    assert shares["checkpointing"] <= shares["recompute_uniform"]
    assert plans["levels"].step_s < plans["recompute_uniform"].step_s
    assert plans["recompute_uniform"].step_s < plans["recompute_all"].step_s


@pytest.mark.exhaustive
def test_all_sides_take_turns_and_agree(tmp_path):
    report, script = tmp_path / "report.json", str(ROOT / "scripts/compare_elastic.py")
    subprocess.run(
        [
            *(sys.executable, script, "--samples", "6", "--scale", "0.05", "--longest", "512"),
            *(
                "--steps",
                "1",
                "--turns",
                "1",
                "--sides",
                "padded,stream,fixed,elastic,elastic_auto,recompute_all,levels",
            ),
            *("--output", str(report), "--plots", str(tmp_path)),
        ],
        check=True,
        capture_output=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = json.loads(report.read_text())
    assert found["loss_difference"] < 1e-4
    assert list(found["simulated"]) == ["2", "4", "8"]
    for name, side in found["measured"].items():
        assert 0 <= side["idle_share"] < 1
        predicted, peaks = side["predicted_peak_bytes"], side["peak_bytes"]
        assert peaks == pytest.approx(predicted, rel=0.05), name
        assert len(side["resident_bytes"]) == 2
        assert (tmp_path / f"elastic_{name}.png").stat().st_size > 10_000
    assert found["measured"]["fixed"]["over_fixed"] == 1
