"""Plans made during the step before: the same plans, losses, weights, whatever goes wrong."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from dataclasses import replace
from unittest import mock

import psutil
import pytest
import torch

from sppo.checkpoint.checkpoint import read_weights
from sppo.engine.engine import Engine
from sppo.training import sample_steps
from sppo.training.sample_steps import StepPlans
from tests.parallel.job.test_launch import wait_for
from tests.planning.elastic.test_step_search import planner
from tests.training.jobs import records
from tests.training.whole_runs.test_parallel_runs import (
    overrides,
    train_as,
    write_samples,
)

REQUEST = (3000, 700, 600, 250, 90, 80, 70, 64, 12, 3), None
OTHER_REQUEST = (2000, 1500, 300, 30, 30, 2), None
TIMEOUT_S = 60.0
STEPS = 4


def plans_of(one=None, *, ahead=True, limit_s=TIMEOUT_S, any_rank=bool):
    one = planner(4096, ranks=2) if one is None else one
    return StepPlans(one, replica=0, ahead=ahead, limit_s=limit_s, any_rank=any_rank)


@pytest.fixture
def plans():
    with contextlib.closing(plans_of()) as made:
        yield made


def in_line(request, *, quick=False):
    return replace(planner(4096, ranks=2), quick=quick).plan_replica(*request, replica=0)


def begun(plans):
    """What is planned at the moment."""
    return plans._begun[1]


def test_a_plan_made_ahead_is_the_one_made_in_line(plans):
    for request in (REQUEST, OTHER_REQUEST):
        plans.begin(request)
        wait_for(begun(plans).done)
        taken = plans.take(request)
        assert taken.plan.digest == in_line(request).digest
        assert taken.plan.step_s == in_line(request).step_s
        assert (taken.wait_s, taken.note) == (0.0, "")


def test_a_step_waits_for_a_plan_that_is_being_made(plans):
    plans.begin(REQUEST)
    assert plans.take(REQUEST).wait_s > 0
    plans.begin(OTHER_REQUEST)
    other = plans.take(REQUEST)  # not what was begun
    assert other.plan.digest == in_line(REQUEST).digest
    assert other.wait_s > 0
    assert other.note == ""


def test_two_processes_may_be_killed(plans):
    for then in ("another one is started", "so is every other step"):
        plans.begin(REQUEST)
        os.kill(plans._worker.pid, signal.SIGKILL)
        taken = plans.take(REQUEST)
        assert taken.note == (
            "the process that plans ahead was killed by SIGKILL: this step is planned when it "
            f"begins, and {then}"
        )
        assert taken.plan.digest == in_line(REQUEST).digest
    plans.begin(REQUEST)
    taken = plans.take(REQUEST)
    assert (taken.note, taken.plan.digest) == ("", in_line(REQUEST).digest)


def test_a_process_killed_before_it_is_given_work(plans):
    plans.begin(REQUEST)
    plans.take(REQUEST)
    worker = psutil.Process(plans._worker.pid)
    worker.kill()
    wait_for(lambda: not worker.is_running())
    plans.begin(OTHER_REQUEST)
    taken = plans.take(OTHER_REQUEST)
    assert "was killed by SIGKILL" in taken.note
    assert taken.plan.digest == in_line(OTHER_REQUEST).digest


def test_what_the_process_raises_is_told(plans):
    plans._pickled = pickle.dumps("not a planner")
    plans.begin(REQUEST)
    taken = plans.take(REQUEST)
    assert "failed (AssertionError: a str is no planner)" in taken.note
    assert taken.plan.digest == in_line(REQUEST).digest


@pytest.mark.exhaustive
def test_samples_that_do_not_fit_are_no_failure_of_the_process():
    small = planner(4096, ranks=2, hardware="a100-80g")
    device = replace(small.base.workload.hardware.device, memory_bytes=1 << 24)
    hardware = replace(small.base.workload.hardware, device=device)
    workload = replace(small.base.workload, hardware=hardware)
    small = replace(small, base=replace(small.base, workload=workload))
    with contextlib.closing(plans_of(small)) as plans:
        plans.begin(REQUEST)
        wait_for(begun(plans).done)
        assert isinstance(begun(plans).exception(), MemoryError)
        with pytest.raises(MemoryError, match="does not fit"):
            plans.take(REQUEST)
        assert plans._worker.pid is not None


def test_a_smaller_search_takes_the_place_of_a_late_plan():
    assert in_line(REQUEST).step_s <= in_line(REQUEST, quick=True).step_s
    assert in_line(REQUEST).digest != in_line(REQUEST, quick=True).digest
    with contextlib.closing(plans_of(limit_s=0.2)) as plans:
        for _ in range(2):  # slow, not broken: every time
            plans._worker.submit(time.sleep, TIMEOUT_S)
            plans.begin(REQUEST)
            taken = plans.take(REQUEST)
            assert taken.note.startswith("its plan was not there after 0.2 s")
            assert taken.wait_s >= 0.2
            assert taken.plan.digest == in_line(REQUEST, quick=True).digest


@pytest.mark.exhaustive
def test_ranks_that_are_not_late_take_the_smaller_search_too():
    with contextlib.closing(plans_of(any_rank=lambda _: True)) as plans:
        plans.begin(REQUEST)
        wait_for(begun(plans).done)
        taken = plans.take(REQUEST)
    assert taken.plan.digest == in_line(REQUEST, quick=True).digest
    assert taken.note == ""


# Whole runs.


def trained(output):
    """What must be the same to the last bit: losses, norms, programs, weights."""
    _, weights = read_weights(output)
    keys = ("loss", "grad_norm", "program_digest", "tokens")
    return [[step[key] for key in keys] for step in records(output)], weights


def assert_same_training(*outputs):
    (steps, weights), (others, other_weights) = map(trained, outputs)
    assert steps == others
    assert weights.keys() == other_weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, other_weights[name]), name


@contextlib.contextmanager
def each_step(do):
    """Call ``do(step)`` when a step of this process has begun, from 1."""
    steps, accumulate = 0, Engine.accumulate

    def counted(*args, **kwargs):
        nonlocal steps
        steps += 1
        do(steps)
        return accumulate(*args, **kwargs)

    with mock.patch.object(Engine, "accumulate", counted):
        yield


@contextlib.contextmanager
def watched_plans():
    """Yield a list that the plans of a run of this process are added to."""
    found = []

    def watched(*args, **kwargs):
        found.append(StepPlans(*args, **kwargs))
        return found[-1]

    with mock.patch.object(sample_steps, "StepPlans", watched):
        yield found


@pytest.fixture
def job(work):
    (work / "tokens").rename(work / "other tokens")
    write_samples(work, {"samples_per_step": 6, "steps": STEPS}, ahead=True)
    return work


IN_LINE = {"train.output": "in line", "planning.ahead": "false"}


@pytest.fixture(scope="module")
def in_line_on_two(tmp_path_factory, ranks):
    """The directory of a run on two ranks that plan each step when it begins."""
    directory = tmp_path_factory.mktemp("two ranks")
    write_samples(directory, {"samples_per_step": 6, "steps": STEPS})
    on_two_ranks(ranks, directory, **IN_LINE)
    return directory / "in line"


def as_rank(rank, directory, arguments, planned_otherwise_by):
    """One rank of a run, which may start processes; waits for plans, for its steps are short."""
    own = multiprocessing.current_process()
    with (
        contextlib.ExitStack() as stack,
        mock.patch.dict(own._config, daemon=False),
        watched_plans() as plans,
    ):

        def begins(step):
            if step < STEPS and plans[0]._ahead:
                wait_for(begun(plans[0]).done)

        if rank == planned_otherwise_by:
            usual = sample_steps.step_planner

            def other(*args, **kwargs):
                found = usual(*args, **kwargs)
                return replace(found, base=replace(found.base, schedule="gpipe"))

            stack.enter_context(mock.patch.object(sample_steps, "step_planner", other))
        stack.enter_context(each_step(begins))
        return train_as(rank, directory, arguments)


def on_two_ranks(ranks, job, *, planned_otherwise_by=None, **more):
    arguments = overrides((1, 2, 1), STEPS, **more)
    return ranks.run(as_rank, job, arguments, planned_otherwise_by, ranks=2)


def test_two_ranks_never_wait_after_the_first_step(ranks, job, in_line_on_two):
    on_two_ranks(ranks, job)
    waits = [step["planning_wait_s"] for step in records(job / "alone")]
    assert waits[0] > 0
    assert waits[1:] == [0.0] * (STEPS - 1)
    assert all(step["planning_wait_s"] > 0 for step in records(in_line_on_two))
    assert_same_training(job / "alone", in_line_on_two)


def test_ranks_with_other_plans_are_refused(ranks, job):
    with pytest.raises(AssertionError, match="rank 1 has made another plan of step 1 than rank 0"):
        on_two_ranks(ranks, job, planned_otherwise_by=1)
