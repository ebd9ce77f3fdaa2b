"""Steps simulated with the seconds that their compute took in a measured run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sppo.schedule.actions import ActionKind
from sppo.schedule.costs import CopyEngines, Costs, LayerCopies, Link, Links, abstract_costs
from sppo.schedule.program import lower
from sppo.schedule.schedule import Schedule
from sppo.schedule.simulation.simulate import simulate, step_seconds
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
        reduce_s=random.uniform(0.5, 1.5, schedule.num_stages),
        message_bytes=np.full(schedule.num_units, 0.5),
        links=Links(Link(0.01, 10.0)),
    )


@pytest.mark.parametrize("name", SUBSEQUENCE_SCHEDULES)
def test_a_step_that_differs_in_its_compute_alone_is_explained_by_it(name: str) -> None:
    planned = _costs(_schedule(name), seed=0)
    schedule = lower(_schedule(name), costs=planned)
    assert any(a.kind is ActionKind.REDUCE for program in schedule.programs for a in program)
    measured = simulate(schedule, costs=_costs(schedule, seed=1))
    explained_s = step_seconds(measured, costs=planned)
    assert explained_s == pytest.approx(measured.makespan_s)
    assert simulate(schedule, costs=planned).makespan_s != pytest.approx(measured.makespan_s)


def test_what_compute_does_not_explain_is_time_between_its_actions() -> None:
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
    explained_s = step_seconds(measured, costs=costs)
    assert measured.makespan_s - explained_s == pytest.approx(LATE_S)


def test_waits_for_copies_inside_compute_are_counted_once() -> None:
    plain = _schedule("seq1f1b")
    fast = _costs(plain, seed=0)
    fast = replace(fast, offload_bytes=fast.activation_bytes)
    slow = replace(
        fast,
        copies=CopyEngines(0.1, 0.1),
        layer_copies=(LayerCopies(layers=4, out=2, back=1),) * plain.num_stages,
    )
    schedule = lower(plain, costs=slow)
    # A run measures a wait for a copy as a part of the action that waited.
    measured = simulate(schedule, costs=replace(fast, backward_s=slow.backward_s + 0.5))
    assert step_seconds(measured, costs=slow) == pytest.approx(measured.makespan_s)
    assert simulate(schedule, costs=slow).makespan_s > 2 * measured.makespan_s
