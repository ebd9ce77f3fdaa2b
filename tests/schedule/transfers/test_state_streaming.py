"""Copies of the weights and gradients of whole stages in a program, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.schedule.actions import COMPUTE_KINDS, ActionKind
from sppo.schedule.checks import find_violations
from sppo.schedule.costs import CopyEngines, abstract_costs
from sppo.schedule.program import forward_part, generate, lower
from sppo.schedule.program_text import format_program, parse_program
from sppo.schedule.simulation.simulate import simulate


def costs(stages, units, *, weights=0.5, gradients=0.5):
    """Forwards of 1 s and backwards of 2 s; copies of a stage take so many seconds."""
    return replace(
        abstract_costs(stages, num_units=units),
        streamed_weight_bytes=np.full(stages, weights),
        streamed_gradient_bytes=np.full(stages, gradients),
        copies=CopyEngines(1.0, 1.0),
    )


def program(name="looped_bfs", *, p=1, v=3, n=2, m=1, forward_only=False, **sizes):
    step = costs(p * v, m * n, **sizes)
    lengths = ((16,) * n,) * m
    made = generate(name, num_ranks=p, num_virtual=v, lengths=lengths)
    return lower(forward_part(made) if forward_only else made, costs=step), step


def text(schedule, rank=0):
    return " ".join(map(str, schedule.programs[rank]))


def test_weights_come_one_phase_ahead_and_gradients_leave_behind_theirs():
    schedule, _ = program()
    assert text(schedule) == (
        "0H2D_WEIGHTS 1H2D_WEIGHTS 0F0.0 0F0.1 2H2D_WEIGHTS 1F0.0 1F0.1 1H2D_WEIGHTS 2F0.0 2F0.1 "
        "2B0.1 2B0.0 2REDUCE 2D2H_GRADIENTS 0H2D_WEIGHTS 1B0.1 1B0.0 1REDUCE 1D2H_GRADIENTS "
        "0B0.1 0B0.0 0REDUCE 0D2H_GRADIENTS"
    )
    assert parse_program(format_program(schedule)) == schedule


def test_gradients_of_a_second_sequence_are_added_to_what_came_back():
    schedule, _ = program(v=2, n=1, m=2, weights=0.0)
    assert text(schedule) == (
        "0F0.0 1F0.0 1B0.0 1D2H_GRADIENTS 1H2D_GRADIENTS 0B0.0 0D2H_GRADIENTS 0F1.0 1F1.0 "
        "0H2D_GRADIENTS 1B1.0 1REDUCE 1D2H_GRADIENTS 0B1.0 0REDUCE 0D2H_GRADIENTS"
    )


def test_an_evaluation_fetches_weights_alone():
    schedule, _ = program(forward_only=True)
    assert text(schedule) == "0H2D_WEIGHTS 1H2D_WEIGHTS 0F0.0 0F0.1 2H2D_WEIGHTS 1F0.0 1F0.1 " + (
        "2F0.0 2F0.1"
    )


def test_what_is_here_already_takes_no_time():
    """Two stages: both come at the start, and stay."""
    schedule, step = program(v=2, n=1, gradients=0.0)
    timeline = simulate(schedule, costs=step)
    copies = {
        str(span.action): (span.start_s, span.finish_s)
        for span in timeline.spans(0)
        if span.lane == "h2d"
    }
    assert copies["0H2D_WEIGHTS"] == (1.5, 1.5)  # the later one of that name
    assert timeline.makespan_s == 0.5 + 2 * 1.0 + 2 * 2.0


def test_copies_that_take_longer_than_a_phase_are_waited_for():
    """Each of three stages runs for 1 s forward; weights take 5 s to come."""
    schedule, step = program(n=1, weights=5.0, gradients=0.0)
    timeline = simulate(schedule, costs=step)
    # 0 and 1 come one behind the other, 2 when 0 is done with, 1 is still there, 0 comes again.
    forward_2 = 10.0 + 5.0
    backward_2 = forward_2 + 1.0
    backward_0 = max(backward_2 + 2.0 + 5.0, backward_2 + 2.0 + 2.0)
    assert timeline.makespan_s == backward_0 + 2.0
    assert timeline.ranks[0].idle_s("copy") == timeline.makespan_s - 9.0


@settings(max_examples=25)
@given(
    name=st.sampled_from(("looped_bfs", "interleaved_seq1f1b", "seq1f1b", "seq_zb_h1")),
    p=st.integers(1, 3),
    v=st.integers(1, 4),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    weights=st.sampled_from((0.0, 0.1, 4.0)),
    gradients=st.sampled_from((0.0, 0.1, 4.0)),
)
def test_programs_are_valid_and_never_faster_than_without_copies(
    name, p, v, counts, weights, gradients
):
    if name in ("seq1f1b", "seq_zb_h1"):
        v = 1
    units = sum(counts)
    lengths = [[8] * count for count in counts]
    step = costs(p * v, units, weights=weights, gradients=gradients)
    made = generate(name, num_ranks=p, num_virtual=v, lengths=lengths)
    streamed = lower(made, costs=step)
    assert not find_violations(streamed)
    bare = costs(p * v, units, weights=0.0, gradients=0.0)
    resident = lower(made, costs=bare)
    assert simulate(streamed, costs=step).makespan_s >= simulate(resident, costs=bare).makespan_s
    free = replace(step, copies=CopyEngines())
    assert simulate(streamed, costs=free).makespan_s == pytest.approx(
        simulate(resident, costs=bare).makespan_s
    )
    for with_copies, without in zip(streamed.programs, resident.programs, strict=True):
        own, others = (
            [a for a in order if a.kind in (*COMPUTE_KINDS, ActionKind.REDUCE)]
            for order in (with_copies, without)
        )
        assert own == others


def test_every_copy_is_needed():
    """Without any one of them, or with it elsewhere, the validator names the rule."""
    schedule, _ = program(v=3, n=1, m=2)
    order = schedule.programs[0]
    for index, action in enumerate(order):
        if action.wire not in ("weights", "gradients"):
            continue
        without = schedule.with_programs(((*order[:index], *order[index + 1 :]),))
        (found, *_) = find_violations(without)
        assert found.rule == "state order", action


def test_shards_have_their_weights_on_the_device():
    lengths = ((4096,) * 4,)
    cut = generate("sppo_msp", num_ranks=4, lengths=lengths)
    assert any(action.num_shards > 1 for order in cut.programs for action in order)
    with pytest.raises(ValueError, match=r"state\.weights=device"):
        lower(cut, costs=costs(4, 4))


def test_state_of_another_tier_passes_queues_of_its_own():
    """Weights wait behind activations on the same way, and on one of their own they do not."""
    _, step = program(n=2, weights=1.0, gradients=0.0)
    slow = replace(step, offload_bytes=np.ones(step.forward_s.shape), copies=CopyEngines(0.5, 0.5))
    made = generate("looped_bfs", num_ranks=1, num_virtual=3, lengths=((16, 16),))
    schedule = lower(made, costs=slow)

    def played(**change):
        timeline = simulate(schedule, costs=replace(slow, **change))
        spans = [span for span in timeline.spans(0) if span.action.wire == "weights"]
        return timeline.makespan_s, {span.finish_s - span.start_s for span in spans}

    together_s, _ = played()
    apart_s, seconds = played(state_copies=CopyEngines(0.5, 0.5))
    assert apart_s < together_s
    assert seconds <= {0.0, 2.0}
    _, seconds = played(state_copies=CopyEngines(1.0, 4.0))
    assert seconds <= {0.0, 0.25}
