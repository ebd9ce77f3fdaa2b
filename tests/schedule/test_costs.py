from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sppo.schedule.abstract import AbstractCase, abstract_case, compared_case
from sppo.schedule.costs import abstract_costs
from sppo.schedule.simulation.simulate import simulate


def test_per_unit_values_repeat_over_the_sequences():
    costs = abstract_costs(2, num_units=4, unit_factors=(1, 3), activation_bytes=(2, 5))
    assert costs.forward_s.tolist() == [[1, 3, 1, 3]] * 2
    assert costs.backward_s.tolist() == [[2, 6, 2, 6]] * 2
    assert costs.activation_bytes.tolist() == [[2, 5, 2, 5]] * 2
    with pytest.raises(ValueError, match="3 unit costs for 4 units: give one per subsequence"):
        abstract_costs(2, num_units=4, unit_factors=(1, 2, 3))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"forward_s": np.array([[1.0, -1.0]])}, "forward_s holds a negative"),
        ({"backward_s": np.array([[1.0, np.inf]])}, "backward_s holds a negative or infinite"),
        ({"weight_s": np.ones((2, 2))}, r"weight_s has shape \(2, 2\): must be \(1, 2\)"),
        ({"message_bytes": np.ones(3)}, r"message_bytes has shape \(3,\)"),
        ({"offload_bytes": np.full((1, 2), 9.0)}, "offload ratio is at most 1"),
    ],
)
def test_wrong_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        replace(abstract_costs(1, num_units=2), **table)


CASE = AbstractCase(schedule="interleaved_seq1f1b", ranks=2, sequences=2, subsequences=4, virtual=2)


def busy(case):
    schedule, costs = case
    timeline = simulate(schedule, costs=costs)
    return [timeline.makespan_s - track.idle_s() for track in timeline.ranks]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "seq1f1b", "sppo_msp", "interleaved_1f1b"])
def test_compared_schedules_do_the_same_work(name):
    """All of them together, because MSP moves work between ranks."""
    uneven = CASE.model_copy(update={"unit_costs": (1, 2, 3, 2)})
    assert sum(busy(compared_case(uneven, name=name))) == pytest.approx(
        sum(busy(abstract_case(uneven)))
    )


def test_merged_costs_may_exceed_the_largest_that_is_accepted():
    large = CASE.model_copy(update={"message_size": 5e29, "kv_size": 5e29, "forward": 6e29})
    _, costs = compared_case(large, name="1f1b")
    assert set(costs.message_bytes) == {4 * 5e29}
    assert set(costs.kv_bytes.flat) == {2 * 4 * 5e29}
    assert costs.forward_s.max() == 4 * 2 * 6e29


def test_costs_that_do_not_fit_the_shape_are_refused():
    with pytest.raises(ValueError, match="3 offload ratios for 8 units"):
        abstract_case(CASE.model_copy(update={"offload_ratio": (0.1, 0.2, 0.3)}))
