"""Corrections of predictions: their inputs, their limits, and their effect on costs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sppo.cost.layer import UNCORRECTED, CostCorrection
from sppo.cost.stage_cost import stage_seconds
from sppo.planning.elastic.replica_plan import StepRequest, plan_replica, predict_step
from sppo.planning.elastic.sample_cost import sample_cost
from sppo.planning.elastic.step_correction import (
    MOST_FACTOR,
    NO_CORRECTION,
    CorrectionHistory,
    StepCorrection,
    StepFigures,
)
from sppo.planning.make_plan import compute_seconds
from tests.planning.elastic.test_step_search import planner

LENGTHS = (3000, 700, 600, 250, 90, 80, 70, 64, 12, 3)
PREDICTED = np.array([1.0, 2.0, 2.5, 4.0, 3.0, 1.5])
BOTH = CostCorrection(1.5, 2.5)


def figures(measured, *, actions=1.0, rest_s=0.5):
    one = float(measured.sum()), float(PREDICTED.sum())
    return StepFigures.of(one, one, actions=actions, rest_s=rest_s)


def history(*steps):
    found = CorrectionHistory()
    for step in steps:
        found = found.after(step)
    return found


@pytest.mark.parametrize(("factor", "expected"), [(1000.0, MOST_FACTOR), (1e-4, 1 / MOST_FACTOR)])
def test_factors_are_bounded(factor, expected):
    found = history(figures(factor * PREDICTED, actions=factor**2)).current
    assert (found.compute.forward, found.compute.backward) == (expected, expected)
    assert found.waiting == expected


def test_nothing_measured_or_predicted():
    nothing = 0.0, 0.0
    found = history(StepFigures.of(nothing, nothing, actions=2.0, rest_s=-1.0)).current
    assert found == StepCorrection(steps=1, waiting=2.0, rest_s=0.0)


def test_waiting_is_what_compute_leaves():
    found = history(figures(2 * PREDICTED, actions=2.5)).current
    assert found.waiting == pytest.approx(1.25)


def test_disturbed_steps_change_nothing():
    usual, disturbed = figures(2 * PREDICTED, actions=2.0), figures(7 * PREDICTED, actions=30.0)
    found = history(usual, disturbed, usual, disturbed, usual, usual, disturbed).current
    assert found == replace(history(usual).current, steps=7)


@pytest.mark.parametrize(
    ("ratios", "steps"),
    [
        pytest.param((4.0, 1.1, 0.9, 1.0), 0, id="one slow step at the start"),
        pytest.param((1.0, 3.0, 1.0, 0.9, 3.5, 1.1), 0, id="slow steps among the predicted"),
        pytest.param((3.0, 0.5, 2.0, 0.4, 1.5, 0.7), 0, id="no step like another"),
        pytest.param((5.0, 4.0, 6.0, 5.0), 4, id="all slow"),
    ],
)
def test_steps_are_corrected_where_that_has_helped(ratios, steps):
    found = history(*(figures(ratio * PREDICTED, actions=ratio) for ratio in ratios))
    assert found.current.steps == steps


def test_old_steps_are_forgotten():
    old, new = figures(5 * PREDICTED), figures(2 * PREDICTED)
    found = history(*[old] * 20, *[new] * 7)
    assert found.current.compute.forward == pytest.approx(2.0)
    assert found.current.steps == 7
    assert len(found.figures) == 8


def test_the_previous_correction_is_that_before_the_last_step():
    steps = [
        figures(factor * PREDICTED) for factor in (1.5, 2.0, 4.0, 3.0, 1.0, 2.0, 6.0, 5.0, 3.5)
    ]
    for count in range(len(steps) + 1):
        before = history(*steps[: max(0, count - 1)])
        assert history(*steps[:count]).previous == before.current
    assert history().previous == history(steps[0]).previous == NO_CORRECTION


def test_what_is_saved_comes_back_to_the_last_bit():
    found = history(*(figures(f * PREDICTED, rest_s=f / 3) for f in (1.1, 2.3, 0.7)))
    assert CorrectionHistory.from_json(json.loads(json.dumps(found.as_json()))) == found


FIGURES = {"forward": 1.0, "backward": 1.0, "waiting": 1.0, "rest_s": 1.0, "actions": 1.0}


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
        CorrectionHistory.from_json(values)


@pytest.mark.parametrize("wrong", [{"forward": 0.0}, {"backward": -1}])
def test_corrections_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        CostCorrection(**wrong)


# What they do to costs.


def seconds(candidate, correction):
    workload = replace(candidate.workload, correction=correction)
    return stage_seconds(replace(candidate, workload=workload))


def plan_of(correction=NO_CORRECTION, *, corrects_plan=False, **more):
    request = StepRequest(LENGTHS, correction, corrects_plan=corrects_plan)
    return plan_replica(planner(4096, ranks=2, **more), request, replica=0)


def test_costs_of_every_stage_are_corrected():
    candidate = plan_of().plan.evaluated.candidate
    plain, corrected = seconds(candidate, UNCORRECTED), seconds(candidate, BOTH)
    np.testing.assert_allclose(corrected.forward, 1.5 * plain.forward)
    for name in ("backward", "weight", "linear_recompute", "attention_recompute"):
        np.testing.assert_allclose(getattr(corrected, name), 2.5 * getattr(plain, name))


def test_packing_asks_for_the_costs_that_stages_have():
    candidate = plan_of().plan.evaluated.candidate
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
    assert found.step_s == pytest.approx(found.plan.step_s, rel=1e-12)
    assert found.uncorrected_s == found.plan.step_s
    evaluated = found.plan.evaluated
    assert found.phases_s[:2] == pytest.approx(compute_seconds(evaluated))
    assert found.phases_s[2] == evaluated.time.update_s


def test_predictions_are_corrected_and_plans_stay():
    correction = StepCorrection(3, CostCorrection(2.0, 2.0), waiting=1.1, rest_s=0.25)
    found = plan_of(correction)
    assert found.plan.digest == plan_of().plan.digest
    assert found.uncorrected_s == plan_of().uncorrected_s
    actions_s = found.uncorrected_actions_s
    assert 1.5 * 1.1 * actions_s < found.step_s - 0.25 <= 2 * 1.1 * actions_s
    assert found.phases_s[2] == 0.25


def test_a_plan_made_with_a_correction_is_that_of_a_slower_machine():
    correction = StepCorrection(3, CostCorrection(0.2, 8.0))
    usual, corrected = plan_of(), plan_of(correction, corrects_plan=True)
    assert corrected.plan.digest != usual.plan.digest
    predicted_s = [predict_step(one.plan, correction).step_s for one in (usual, corrected)]
    assert predicted_s[1] < predicted_s[0]
    plain = predict_step(corrected.plan, NO_CORRECTION)
    assert plain.step_s == pytest.approx(plain.uncorrected_s)
    assert corrected.uncorrected_s == plain.uncorrected_s


def test_a_corrected_prediction_is_the_simulation_of_corrected_costs():
    correction = StepCorrection(3, BOTH, waiting=1.0, rest_s=0.0)
    found = plan_of(correction, corrects_plan=True)
    simulated = found.plan.evaluated
    update_s = simulated.time.update_s
    assert found.step_s == pytest.approx(simulated.step_s - update_s, rel=1e-9)
