"""Simulation of ranks with one order by diagonals, against that of one rank after the other."""

from __future__ import annotations

import pytest

from sppo.schedule.encoding import B, F, W
from sppo.schedule.simulation import whole_units
from sppo.schedule.simulation.lockstep import Compute, runs_in_lockstep
from sppo.schedule.simulation.whole_units import simulate_whole_units, whole_unit_ends
from tests.schedule.simulation.test_whole_units import some_costs


@pytest.mark.parametrize("copies", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual", "counts"),
    [
        ("sppo", 9, 1, [14]),
        ("sppo", 7, 1, [3]),
        ("gpipe", 5, 1, [1, 1, 1, 1]),
        ("looped_bfs", 3, 4, [5, 5]),
        ("looped_bfs", 6, 3, [4, 4, 4]),
        ("looped_bfs", 4, 2, [7, 2]),
    ],
)
def test_times_are_those_of_one_rank_after_the_other(
    schedule, ranks, virtual, counts, copies, monkeypatch
):
    costs = some_costs(stages=ranks * virtual, units=sum(counts), copies=copies, seed=len(counts))
    shape = {
        "num_ranks": ranks,
        "num_virtual": virtual,
        "lengths": [[16] * count for count in counts],
    }
    found = []
    for at_once in (True, False):
        monkeypatch.setattr(whole_units, "runs_in_lockstep", lambda *_, _is=at_once, **__: _is)
        step = simulate_whole_units(schedule, **shape, costs=costs)
        ends = whole_unit_ends(schedule, **shape, costs=costs)
        found.append((step.step_s, step.idle_s.tolist(), step.held_bytes.tolist(), ends))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("codes", "ranks", "expected"),
    [
        ([F] * 40 + [B] * 40, 32, True),
        ([F] * 40 + [B] * 40, 8, False),
        ([F, B] * 40, 32, False),
        ([F] * 40 + [B] * 40 + [W] * 40, 32, False),
    ],
)
def test_long_pipelines_of_long_passes_run_in_lockstep(codes, ranks, expected):
    units = [sum(code == codes[at] for code in codes[:at]) for at in range(len(codes))]
    order = Compute(codes, [0] * len(codes), units)
    assert runs_in_lockstep(order, num_ranks=ranks) is expected


def test_an_order_against_the_stages_does_not_run_in_lockstep():
    units = [*range(40)]
    forwards, backwards = [0] * 40 + [1] * 40, [1] * 40 + [0] * 40
    codes = [F] * 80 + [B] * 80
    assert runs_in_lockstep(Compute(codes, forwards + backwards, units * 4), num_ranks=32)
    assert not runs_in_lockstep(Compute(codes, backwards + backwards, units * 4), num_ranks=32)
    assert not runs_in_lockstep(Compute(codes, forwards + forwards, units * 4), num_ranks=32)
