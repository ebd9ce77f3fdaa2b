import numpy as np
import pytest

from sppo.plots.timeline_report import timeline_report
from sppo.schedule.costs import abstract_costs
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.timeline import measured_timeline
from tests.schedule.cases import make, play


def test_a_measured_timeline_has_the_same_numbers_as_the_simulated_one():
    schedule = make("seq1f1b", p=2, n=2, m=2)
    planned = play(schedule)
    times = [
        list(zip(track.start_s.tolist(), track.finish_s.tolist(), strict=True))
        for track in planned.ranks
    ]
    measured = measured_timeline(schedule, times_s=times)
    assert measured.provenance == "measured"
    assert measured.makespan_s == planned.makespan_s
    assert measured.bubble_fraction == pytest.approx(planned.bubble_fraction)
    assert [t.peak_in_flight for t in measured.ranks] == [t.peak_in_flight for t in planned.ranks]
    assert timeline_report(measured)["device_peak_bytes"] == [0, 0]


def test_memory_over_time_has_one_value_per_moment():
    track = play(make("seq1f1b", p=2, n=2, m=4)).ranks[0].memory["total"]
    assert np.all(np.diff(track.times_s) > 0)
    assert track.values_bytes[-1] == 0
    assert track.peak_bytes == 3


def test_a_step_without_time_has_no_bubble():
    schedule = make("sppo", p=2, n=1, m=1)
    costs = abstract_costs(2, num_units=1, forward_s=0.0, backward_s=0.0)
    timeline = simulate(schedule, costs=costs)
    assert timeline.makespan_s == timeline.bubble_fraction == timeline.bubble_ratio == 0
