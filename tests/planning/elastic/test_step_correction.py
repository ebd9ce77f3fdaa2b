"""Corrections of predictions: their inputs, their limits, and their effect on costs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sppo.cost.layer import UNCORRECTED, CostCorrection
from sppo.cost.stages.seconds import stage_seconds
from sppo.planning.elastic.sample_cost import sample_cost
from sppo.planning.elastic.step_correction import (
    MOST_FACTOR,
    StepCorrection,
    correction_by,
    extended,
    history_from_json,
    history_json,
    measured_step,
)
from sppo.planning.elastic.step_plan import StepPlan
from sppo.planning.make_plan import compute_seconds
from tests.planning.elastic.test_step_search import planner

LENGTHS = (3000, 700, 600, 250, 90, 80, 70, 64, 12, 3)
PREDICTED = np.array([1.0, 2.0, 2.5, 4.0, 3.0, 1.5])
BOTH = CostCorrection(1.5, 2.5)


def figures(measured, *, actions=1.0, rest_s=0.5):
    one = float(measured.sum()), float(PREDICTED.sum())
    return measured_step(one, one, actions=actions, rest_s=rest_s)


def history(*steps):
    found = ()
    for step in steps:
        found = extended(found, step)
    return found


def corrected_by(*steps):
    return correction_by(history(*steps))


@pytest.mark.parametrize(("factor", "expected"), [(1000.0, MOST_FACTOR), (1e-4, 1 / MOST_FACTOR)])
def test_factors_are_bounded(factor, expected):
    found = corrected_by(figures(factor * PREDICTED, actions=factor**2))
    assert (found.compute.forward, found.compute.backward) == (expected, expected)
    assert found.waiting == expected


def test_nothing_measured_or_predicted():
    nothing = 0.0, 0.0
    found = corrected_by(measured_step(nothing, nothing, actions=2.0, rest_s=-1.0))
    assert found == StepCorrection(1.0, 1.0, waiting=2.0, rest_s=0.0)


def test_waiting_is_what_compute_leaves():
    found = corrected_by(figures(2 * PREDICTED, actions=2.5))
    assert found.waiting == pytest.approx(1.25)


def test_disturbed_steps_change_nothing():
    usual, disturbed = figures(2 * PREDICTED, actions=2.0), figures(7 * PREDICTED, actions=30.0)
    found = corrected_by(usual, disturbed, usual, disturbed, usual, usual, disturbed)
    assert found == replace(usual, steps=7)


def test_old_steps_are_forgotten():
    old, new = figures(5 * PREDICTED), figures(2 * PREDICTED)
    found = history(*[old] * 20, *[new] * 7)
    assert correction_by(found).compute.forward == pytest.approx(2.0)
    assert correction_by(found).steps == 7
    assert len(found) == 8


def test_what_is_saved_comes_back_to_the_last_bit():
    found = history(*(figures(f * PREDICTED, rest_s=f / 3) for f in (1.1, 2.3, 0.7)))
    assert history_from_json(json.loads(json.dumps(history_json(found)))) == found


FIGURES = {"forward": 1.0, "backward": 1.0, "waiting": 1.0, "rest_s": 1.0}


@pytest.mark.parametrize(
    "values",
    [
        None,
        [FIGURES, 3],
        [{"forward": 1.0}],
        [{**FIGURES, "forward": "1"}],
        [{**FIGURES, "rest_s": float("nan")}],
        [FIGURES] * 9,
    ],
    ids=str,
)
def test_what_is_no_history_is_refused(values):
    with pytest.raises(ValueError, match="no history of corrections"):
        history_from_json(values)


@pytest.mark.parametrize("wrong", [{"forward": 0.0}, {"backward": -1}])
def test_corrections_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        CostCorrection(**wrong)


# What they do to costs.


def seconds(candidate, correction):
    workload = replace(candidate.workload, correction=correction)
    return stage_seconds(replace(candidate, workload=workload))


def plan_of(correction=None, *, corrects_plans=False):
    made_by = replace(planner(4096, ranks=2), corrects_plans=corrects_plans)
    return made_by.plan_replica(LENGTHS, correction, replica=0)


def correction(forward, backward, *, waiting=1.0, rest_s=0.0):
    return StepCorrection(forward, backward, waiting=waiting, rest_s=rest_s)


def test_costs_of_every_stage_are_corrected():
    candidate = plan_of().evaluated.candidate
    plain, corrected = seconds(candidate, UNCORRECTED), seconds(candidate, BOTH)
    np.testing.assert_allclose(corrected.forward, 1.5 * plain.forward)
    for name in ("backward", "weight", "linear_recompute", "attention_recompute"):
        np.testing.assert_allclose(getattr(corrected, name), 2.5 * getattr(plain, name))


def test_packing_asks_for_the_costs_that_stages_have():
    candidate = plan_of().evaluated.candidate
    workload = replace(candidate.workload, correction=BOTH)
    cost = sample_cost(workload, most_tokens=8192)
    tokens = np.array([512.0])
    one = replace(candidate, workload=workload, packed=(), lengths=(512,), sequences=1)
    units = stage_seconds(one)
    expected = (units.forward + units.backward + units.weight).sum()
    found = cost.without_attention_s(tokens) + cost.attention_s(np.zeros(1), tokens)
    assert float(found[0]) == pytest.approx(float(expected))


def test_without_a_step_predictions_are_those_of_the_plan():
    found = plan_of()
    assert found.predicted_s == found.uncorrected.step_s == found.step_s
    evaluated = found.evaluated
    assert found.phases_s[:2] == pytest.approx(compute_seconds(evaluated))
    assert found.phases_s[2] == evaluated.time.update_s


def test_predictions_are_corrected_and_plans_stay():
    found = plan_of(correction(2.0, 2.0, waiting=1.1, rest_s=0.25))
    assert found.digest == plan_of().digest
    assert found.uncorrected.step_s == plan_of().step_s
    actions_s = found.uncorrected_actions_s
    assert 1.5 * 1.1 * actions_s < found.predicted_s - 0.25 <= 2 * 1.1 * actions_s
    assert found.phases_s[2] == 0.25


def test_a_plan_made_with_a_correction_is_that_of_a_slower_machine():
    slower = correction(0.2, 8.0)
    usual, corrected = plan_of(), plan_of(slower, corrects_plans=True)
    assert corrected.digest != usual.digest
    assert corrected.predicted_s < replace(usual, correction=slower).predicted_s
    plain = StepPlan(corrected.packed, corrected.evaluated)
    assert plain.predicted_s == pytest.approx(corrected.uncorrected.step_s)
    # A corrected prediction is the simulation of corrected costs.
    simulated = corrected.evaluated
    actions_s = simulated.step_s - simulated.time.update_s
    assert corrected.predicted_s == pytest.approx(actions_s, rel=1e-9)
