"""Simulation of steps of whole units without a program, against that of the program."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sppo.schedule.costs import CopyEngines, Costs, LayerCopies, Link, Links
from sppo.schedule.encoding import NUM_COMPUTE
from sppo.schedule.orders.names import WHOLE_SEQUENCES, WITH_VIRTUAL_STAGES
from sppo.schedule.program import step_program
from sppo.schedule.simulation import whole_units
from sppo.schedule.simulation.event_loop import DeadlockError, run_clock
from sppo.schedule.simulation.simulate import simulate
from sppo.schedule.simulation.simulated_step import simulated_step
from sppo.schedule.simulation.whole_units import simulate_whole_units, whole_unit_ends
from sppo.schedule.transfers.communication import place_messages
from tests.tiers import examples

SCHEDULES = (
    "sppo",
    "seq1f1b",
    "seq_zb_h1",
    "gpipe",
    "1f1b",
    "zb_h1",
    "interleaved_seq1f1b",
    "looped_bfs",
)


def some_costs(*, stages: int, units: int, copies: float, seed: int) -> Costs:
    """Unequal units and stages; a fraction `copies` of the units is offloaded in part."""
    dice = np.random.default_rng(seed)

    def table() -> np.ndarray:
        return dice.uniform(0.5, 2.0, (stages, units))

    kept = table()
    between = {(s, s + 1): Link(dice.uniform(0, 0.3), dice.uniform(1, 9)) for s in range(stages)}
    return Costs(
        forward_s=table(),
        backward_s=2 * table(),
        weight_s=table(),
        reduce_s=dice.uniform(0, 3, stages),
        last_reduction_wait_s=np.zeros(stages),
        message_bytes=dice.uniform(0.5, 2.0, units),
        activation_bytes=kept,
        kv_offload_bytes=np.zeros(kept.shape),
        kv_recompute_s=np.zeros(kept.shape),
        offload_bytes=kept
        * dice.uniform(0.2, 1.0, kept.shape)
        * (dice.random(kept.shape) < copies),
        operand_bytes=table(),
        kv_bytes=table(),
        kv_gradient_bytes=table(),
        weight_bytes=np.zeros(stages),
        weight_gradient_bytes=np.zeros(stages),
        streamed_weight_bytes=np.zeros(stages),
        streamed_gradient_bytes=np.zeros(stages),
        links=Links(Link(dice.uniform(0, 0.3), dice.uniform(1, 9)), between),
        copies=CopyEngines(dice.uniform(0.2, 3), dice.uniform(0.2, 3)),
        layer_copies=tuple(
            LayerCopies(
                int(dice.integers(1, 6)), int(dice.integers(1, 4)), int(dice.integers(1, 3))
            )
            for _ in range(stages)
        ),
    )


@settings(deadline=None, max_examples=examples(20, all=60))
@given(
    schedule=st.sampled_from(SCHEDULES),
    ranks=st.integers(1, 5),
    virtual=st.integers(1, 3),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    copies=st.sampled_from([0.0, 0.6, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
@example(schedule="sppo", ranks=4, virtual=1, counts=[6, 6, 6], copies=1.0, seed=1)
@example(schedule="seq_zb_h1", ranks=3, virtual=1, counts=[5, 2], copies=0.6, seed=2)
@example(schedule="sppo", ranks=1, virtual=1, counts=[4, 3], copies=1.0, seed=3)
@example(schedule="looped_bfs", ranks=2, virtual=3, counts=[4, 3], copies=0.6, seed=4)
@example(schedule="looped_bfs", ranks=1, virtual=3, counts=[4, 3], copies=1.0, seed=5)
@example(schedule="interleaved_seq1f1b", ranks=3, virtual=2, counts=[4, 3], copies=0.6, seed=6)
@example(schedule="sppo", ranks=16, virtual=1, counts=[60], copies=0.6, seed=7)  # in lockstep
def test_a_step_is_that_of_its_program(schedule, ranks, virtual, counts, copies, seed):
    whole = schedule in WHOLE_SEQUENCES
    virtual = virtual if schedule in WITH_VIRTUAL_STAGES else 1
    lengths = [[16] * (1 if whole else count) for count in counts]
    costs = some_costs(
        stages=ranks * virtual, units=sum(map(len, lengths)), copies=copies, seed=seed
    )
    shape = {"num_ranks": ranks, "num_virtual": virtual, "lengths": lengths}
    program = step_program(schedule, **shape, costs=costs)
    expected = simulated_step(simulate(program, costs=costs))
    found = simulate_whole_units(schedule, **shape, costs=costs)
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
    assert found.idle_s == pytest.approx(expected.idle_s, abs=1e-9)
    assert found.held_bytes == pytest.approx(expected.held_bytes, rel=1e-12)
    assert found.bubble_fraction == pytest.approx(expected.bubble_fraction, abs=1e-12)
    assert found.exposed_copy_s == pytest.approx(expected.exposed_copy_s, abs=1e-9)
    unsent = step_program(schedule, **shape, costs=costs, messages=False)
    programs = unsent.encoded
    clock = run_clock(unsent, programs=programs, costs=costs)
    ends = [
        np.array(finishes)[program.codes < NUM_COMPUTE].tolist()
        for finishes, program in zip(clock.finishes_s, programs, strict=True)
    ]
    assert whole_unit_ends(schedule, **shape, costs=costs) == ends
    assert place_messages(unsent, costs=costs) == program


def test_ranks_that_wait_for_each_other_are_named(monkeypatch):
    def contradicting(name, **request):
        first, second = orders(name, **request)
        return [[*reversed(first)], second]

    orders = whole_units.rank_orders
    monkeypatch.setattr(whole_units, "rank_orders", contradicting)
    with pytest.raises(DeadlockError, match="rank 0 and 1 others wait for each other") as raised:
        simulate_whole_units(
            "seq1f1b",
            num_ranks=2,
            lengths=[[1]],
            costs=some_costs(stages=2, units=1, copies=0.0, seed=0),
        )
    assert (raised.value.rank, raised.value.index) == (0, 0)
