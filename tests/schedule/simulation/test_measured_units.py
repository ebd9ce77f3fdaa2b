"""Steps simulated with the seconds that their units took in a measured run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sppo.schedule.actions import Schedule
from sppo.schedule.costs import CopyEngines, Costs, Link, Links, abstract_costs
from sppo.schedule.program import lower
from sppo.schedule.simulation.measured_units import compute_seconds, median_seconds, step_seconds
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.timeline import measured_timeline
from tests.schedule.cases import SUBSEQUENCE_SCHEDULES, make

LATE_S = 0.75


def _schedule(name: str) -> Schedule:
    stages = 2 if name in ("interleaved_seq1f1b", "looped_bfs") else 1
    return make(name, p=3, n=6, m=1 if name == "sppo_msp" else 2, v=stages)


def _costs(schedule: Schedule, *, seed: int) -> Costs:
    """Return costs in which every unit of every stage takes another time."""
    random = np.random.default_rng(seed)
    shape = schedule.num_stages, schedule.num_units
    costs = abstract_costs(schedule.num_stages, num_units=schedule.num_units)
    return replace(
        costs,
        forward_s=random.uniform(0.5, 2.0, shape),
        backward_s=random.uniform(0.5, 3.0, shape),
        weight_s=random.uniform(0.5, 1.5, shape),
        message_bytes=np.full(schedule.num_units, 0.5),
        links=Links(Link(0.01, 10.0)),
    )


@pytest.mark.parametrize("name", SUBSEQUENCE_SCHEDULES)
def test_a_step_that_differs_in_its_units_alone_is_explained_by_them(name: str) -> None:
    schedule = _schedule(name)
    planned, happened = (_costs(schedule, seed=seed) for seed in (0, 1))
    measured = simulate(schedule, costs=happened)
    compute = compute_seconds(measured)
    assert step_seconds(measured, costs=planned, compute=compute) == pytest.approx(
        measured.makespan_s
    )
    assert simulate(schedule, costs=planned).makespan_s != pytest.approx(measured.makespan_s)


def test_what_units_do_not_explain_is_time_between_them() -> None:
    schedule = _schedule("seq1f1b")
    costs = _costs(schedule, seed=0)
    planned = simulate(schedule, costs=costs)
    times = [
        list(zip(track.start_s.tolist(), track.finish_s.tolist(), strict=True))
        for track in planned.ranks
    ]
    # The last action of every rank begins late, as if its rank had been held up.
    late = [[*own[:-1], (own[-1][0] + LATE_S, own[-1][1] + LATE_S)] for own in times]
    measured = measured_timeline(schedule, times_s=late)
    explained_s = step_seconds(measured, costs=costs, compute=compute_seconds(measured))
    assert measured.makespan_s - explained_s == pytest.approx(LATE_S)


def test_waits_for_copies_are_counted_once_as_part_of_the_measured_units() -> None:
    costs = _costs(_schedule("seq1f1b"), seed=0)
    ones = np.ones_like(costs.forward_s)
    slow = replace(costs, activation_bytes=ones, offload_bytes=ones, copies=CopyEngines(0.1, 0.1))
    schedule = lower(_schedule("seq1f1b"), costs=slow)
    measured = simulate(schedule, costs=replace(slow, copies=CopyEngines()))
    assert simulate(schedule, costs=slow).makespan_s > 2 * measured.makespan_s
    explained_s = step_seconds(measured, costs=slow, compute=compute_seconds(measured))
    assert explained_s == pytest.approx(measured.makespan_s)


def test_the_median_of_several_steps_is_taken_action_by_action() -> None:
    steps = [{(0, 0): 1.0, (1, 0): 9.0}, {(0, 0): 3.0, (1, 0): 2.0}, {(0, 0): 2.0, (1, 0): 4.0}]
    assert median_seconds(steps) == {(0, 0): 2.0, (1, 0): 4.0}
