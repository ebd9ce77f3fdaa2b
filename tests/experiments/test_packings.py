"""Comparison of packings of samples: the packing and the memory of each side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import packing_sides as sides
from experiments.packings import MODEL
from sppo.hardware.presets import PRESETS

LENGTHS = (300, 40, 700, 60, 10)


def request_of(*lengths, longest, share=0.5):
    laptop = PRESETS["laptop-cpu"]
    return sides.Request(MODEL, "fp32", laptop, 1 << 30, lengths, longest, longest, None, share)


def tokens_of(packing):
    """Every token of every sample that a packing has, in order."""
    return sorted(
        (piece.sample, position)
        for pieces in packing.pieces
        for piece in pieces
        for position in range(piece.begin, piece.end)
    )


def figures_of(steps, request):
    return sides.figures([step.plan for step in steps], request.lengths)


def test_sides_are_planned_for_the_same_tokens():
    request = request_of(LENGTHS, LENGTHS[:3], longest=1024)
    names = (*sides.PACKINGS, *sides.ELASTIC)
    found = sides.side_steps(request, ranks=2, sides=names)
    figures = {name: figures_of(steps, request) for name, steps in found.items()}
    every_token = [(sample, at) for sample, tokens in enumerate(LENGTHS) for at in range(tokens)]
    for name, steps in found.items():
        assert tokens_of(steps[0].packing) == every_token
        padding = 5 * 700 - sum(LENGTHS) if name == "padded" else 0
        assert figures[name]["padding_tokens"][0] == padding
    assert {*figures["elastic"]["schedules"]} == {"sppo"}
    assert figures["elastic_auto"]["virtual_stages"] > 1
    for name in sides.ELASTIC:
        assert figures[name]["held_bytes"] <= figures["fixed"]["held_bytes"]
    assert figures["padded"]["tokens_per_s"] < figures["fixed"]["tokens_per_s"]
    assert figures["elastic"]["tokens_per_s"] >= 0.98 * figures["fixed"]["tokens_per_s"]
    asked = sides.side_steps(replace(request, chunk_tokens=512), ranks=2, sides=["fixed"])["fixed"]
    assert asked[0].plan.evaluated.candidate.lengths == (410, 512, 188)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_sides_that_recompute_have_the_same_samples_and_memory(share):
    lengths = (3000, 40, 700, 1060, 10, 900, 2000)
    request = request_of(lengths, longest=4096, share=share)
    found = sides.side_steps(request, ranks=2, sides=[*sides.RECOMPUTING])
    plans = {name: steps[0].plan for name, steps in found.items()}
    (budget,) = {plan.evaluated.candidate.budget_bytes for plan in plans.values()}
    assert len({plan.packed for plan in plans.values()}) == 1
    for plan in plans.values():
        assert plan.device_peak_bytes <= budget
        assert not plan.evaluated.placement.offloaded.any()
    shares = {name: sides.recomputed_share(plan) for name, plan in plans.items()}
    assert shares["recompute_all"] == 1.0
    assert 0 < shares["levels"] < shares["recompute_uniform"] < 1
    assert shares["checkpointing"] <= shares["recompute_uniform"]
    assert plans["levels"].step_s < plans["recompute_uniform"].step_s
    assert plans["recompute_uniform"].step_s < plans["recompute_all"].step_s
