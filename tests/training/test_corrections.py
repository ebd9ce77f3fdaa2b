"""Predictions of a run of samples, corrected by its steps: logged, saved, alike on all ranks."""

import contextlib
import multiprocessing
import shutil
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from sppo.engine.trace import ExecutedAction
from sppo.hardware.presets import PRESETS
from sppo.planning.elastic.step_correction import StepCorrection
from sppo.planning.run_plan import plan_run
from sppo.schedule.actions import Action, ActionKind
from sppo.schedule.costs import abstract_costs
from sppo.training import sample_steps
from sppo.training.sample_steps import action_sums, history_to_save, saved_history
from tests.conftest import write_run, write_tokens
from tests.planning.cases import run_config
from tests.training.jobs import records
from tests.training.test_planning_ahead import assert_same_training
from tests.training.whole_runs.test_parallel_runs import (
    MODEL,
    OPTIMIZER,
    alone,
    overrides,
    train_as,
)

STEPS = 5
CORRECTED = {"planning.corrected": "true"}


LENGTHS = (1500, 40, 900, 130, 700, 300, 64, 1100, 210, 420, 90, 33, 250)
"""Tokens of the documents: enough for subsequences of several sizes."""


@pytest.fixture
def job(work):
    shutil.rmtree(work / "tokens")
    ends = np.cumsum(LENGTHS).tolist()
    write_tokens(work / "tokens", num_tokens=ends[-1], documents=ends[:-1])
    write_run(
        work / "run.yaml",
        model=MODEL,
        data={"samples": "documents", "shuffle": True},
        sequence={"length": 2048, "num_subsequences": "auto"},
        optimizer=OPTIMIZER,
        planning={"ahead": False},  # starting processes takes longer than these steps
        train={"steps": STEPS, "samples_per_step": 6, "output": "alone"},
    )
    return work


def told(step):
    """Figures of a step that are the same whenever it runs, and far off."""
    return StepCorrection(3.0 + step, 3.0 + step, 1.5, 0.01)


def as_rank(rank, directory, arguments, first_step):
    """One rank, whose steps seem to take what :func:`told` says; or what they do (None)."""
    own = multiprocessing.current_process()
    with contextlib.ExitStack() as stack:
        if first_step is not None:
            figures = map(told, range(first_step, STEPS))
            stack.enter_context(
                mock.patch.object(sample_steps, "step_figures", side_effect=figures)
            )
        stack.enter_context(mock.patch.dict(own._config, daemon=False))
        return train_as(rank, directory, arguments)


def on_two_ranks(ranks, job, output, *, steps=STEPS, first_step=0, **more):
    arguments = overrides((1, 2, 1), steps, **{"train.output": output}, **more)
    assert ranks.run(as_rank, job, arguments, first_step, ranks=2) == [steps] * 2


def test_every_step_says_what_its_prediction_rests_on(job):
    alone(job, overrides((1, 1, 1), STEPS))
    steps = records(job / "alone")
    assert [step["correction_steps"] for step in steps] == [0, 0, 1, 2, 3]
    for step in steps[:2]:
        assert step["predicted_step_s"] == pytest.approx(step["uncorrected_step_s"], rel=1e-9)
    assert all(step["predicted_step_s"] != step["uncorrected_step_s"] for step in steps[2:])
    figures = map(told, range(STEPS))
    with mock.patch.object(sample_steps, "step_figures", side_effect=figures):
        alone(job, overrides((1, 1, 1), STEPS, **{"train.output": "told"}))
    assert_same_training(job / "alone", job / "told")


def corrected_alone(job, output, *, steps=STEPS, first_step=0):
    arguments = overrides((1, 1, 1), steps, **{"train.output": output}, **CORRECTED)
    assert as_rank(0, job, arguments, first_step) == steps


def test_a_resumed_run_plans_the_same(job):
    corrected_alone(job, "whole")
    corrected_alone(job, "halves", steps=3)
    corrected_alone(job, "halves", first_step=3)
    keys = ("correction_steps", "predicted_step_s", "uncorrected_step_s")
    for step, other in zip(records(job / "whole"), records(job / "halves"), strict=True):
        assert [step[key] for key in keys] == [other[key] for key in keys]
    assert_same_training(job / "whole", job / "halves")


@pytest.mark.exhaustive
def test_what_was_measured_is_saved_for_two_steps_more(ranks, job):
    """The next step's plan was begun before the last one was measured, and the one after knows."""
    on_two_ranks(ranks, job, "first", steps=3, first_step=None, **CORRECTED)
    shutil.copytree(job / "first", job / "again")
    for output, ahead in (("first", "false"), ("again", "true")):
        more = {**CORRECTED, "planning.ahead": ahead}
        on_two_ranks(ranks, job, output, steps=5, first_step=None, **more)
    first, again = records(job / "first"), records(job / "again")
    keys = ("correction_steps", "predicted_step_s", "program_digest")
    assert [[s[k] for k in keys] for s in first] == [[s[k] for k in keys] for s in again]
    assert_same_training(job / "first", job / "again")


def test_a_history_of_other_ranks_or_that_cannot_be_read_is_not_used(caplog):
    plan = plan_run(
        run_config("tiny", parallel={"pipeline_parallel_degree": 2}),
        hardware=PRESETS["h100"],
        available_bytes=1 << 36,
    )
    history = (told(0), told(1), told(2))
    saved = history_to_save(history, plan=plan)
    assert saved_history(saved, plan=plan) == history
    assert saved_history({}, plan=plan) == ()
    other = replace(plan, data_parallel_degree=2)
    assert saved_history(saved, plan=other) == ()
    saved["step_correction"]["steps"][1] = ["x"]
    assert saved_history(saved, plan=plan) == ()
    assert "predictions begin without correction: step_correction of the checkpoint" in caplog.text


def executed(kind, stage, unit, seconds):
    return ExecutedAction(Action(kind, stage, *unit), 10.0, 10.0 + seconds)


@pytest.mark.parametrize("halves", [False, True])
def test_actions_are_compared_with_the_costs_of_their_unit(halves):
    units = [(0, 0), (0, 1), (1, 0)]
    costs = abstract_costs(2, num_units=3, backward_s=2.0, weight_s=0.5)
    costs = replace(costs, forward_s=np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    kinds = (ActionKind.B, ActionKind.W) if halves else (ActionKind.B,)
    trace = [executed(ActionKind.F, 1, unit, 7.0) for unit in units]
    trace += [executed(kind, 1, unit, 1.0) for unit in reversed(units) for kind in kinds]
    forward = action_sums(trace, costs, kinds=(ActionKind.F,))
    assert forward == (21.0, 15.0)
    measured_s, predicted_s = action_sums(trace, costs, kinds=(ActionKind.B, ActionKind.W))
    assert measured_s == 3.0 * len(kinds)
    assert predicted_s == pytest.approx((costs.backward_s + costs.weight_s)[1].sum())
