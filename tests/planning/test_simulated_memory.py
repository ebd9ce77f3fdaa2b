"""Simulated peaks beside the closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sppo.config import check_run
from sppo.hardware.presets import PRESETS
from sppo.planning.choices import Degrees
from sppo.planning.evaluated_candidate import assess
from sppo.planning.simulated_candidate import simulate_candidate
from sppo.planning.simulated_memory import simulated_device_bytes, simulated_excess
from sppo.planning.solver import candidate_of_subsequences

NODE = PRESETS["h100"]


def candidate_of(num_subsequences, degrees, *, hardware=NODE, simulated=True):
    raw = {
        "model": {"preset": "llama-3.2-1b"},
        "data": {"tokens": "none"},
        "sequence": {"length": 64 << 10},
        "parallel": {"schedule": "sppo"},
        "activations": {"policy": "retain"},
    }
    run = check_run(raw, source="test")
    candidate = candidate_of_subsequences(
        run, hardware=hardware, degrees=degrees, num_subsequences=num_subsequences
    )
    evaluated = assess(candidate)
    return simulate_candidate(evaluated) if simulated else evaluated


@pytest.mark.parametrize("degrees", [Degrees(1, 1, 8), Degrees(1, 4, 2), Degrees(1, 8, 1)])
def test_one_sequence_that_keeps_everything_holds_what_the_closed_form_says(degrees):
    evaluated = candidate_of(8, degrees)
    closed = [held.device.total_bytes for held in evaluated.memory]
    assert simulated_device_bytes(evaluated) == pytest.approx(closed, rel=1e-6)
    assert simulated_excess(evaluated) is None


def test_without_a_simulation_nothing_is_said():
    evaluated = candidate_of(8, Degrees(1, 4, 2), simulated=False)
    assert simulated_device_bytes(evaluated) is None
    assert simulated_excess(evaluated) is None


def test_the_fullest_stage_over_the_budget_is_named():
    small = replace(NODE, device=replace(NODE.device, memory_bytes=8 << 30, reserved_bytes=0))
    evaluated = candidate_of(8, Degrees(1, 4, 2), hardware=small)
    peaks = simulated_device_bytes(evaluated)
    assert simulated_excess(evaluated) == (peaks.index(max(peaks)), max(peaks))
    assert max(peaks) > 8 << 30
