"""K and V that leave the device between a stage's forward and its backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.schedule.actions import ActionKind
from sppo.schedule.checks.validate import find_violations
from sppo.schedule.costs import CopyEngines, LayerCopies, abstract_costs
from sppo.schedule.kv_copies import place_kv_copies
from sppo.schedule.program import step_program
from sppo.schedule.program_text import format_program, parse_program
from sppo.schedule.simulate import simulate
from tests.schedule.cases import make, peaks


def costs(stages, units, *, leaving, copy_s=0.5, layers=1, saved_s=0.0):
    """Forwards of 1 s and backwards of 2 s beside copies of K and V that take ``copy_s`` each."""
    found = abstract_costs(stages, num_units=units)
    kv = np.zeros((stages, units))
    kv[list(leaving)] = copy_s
    return replace(
        found,
        kv_bytes=np.ones((stages, units)),
        kv_offload_bytes=kv,
        activation_bytes=np.full((stages, units), saved_s),
        offload_bytes=np.full((stages, units), saved_s),
        copies=CopyEngines(1.0, 1.0),
        layer_copies=(LayerCopies(layers, 2, 2),) * stages,
    )


def program(name="looped_bfs", *, p=1, v=3, n=4, m=1, leaving=(0, 1), **how):
    step = costs(p * v, m * n, leaving=leaving, **how)
    return step_program(
        name, num_ranks=p, num_virtual=v, lengths=((16,) * n,) * m, costs=step
    ), step


def test_keys_come_back_beside_the_backwards_of_the_stage_behind():
    schedule, _ = program(v=2, n=2, leaving=(0,))
    assert " ".join(map(str, schedule.programs[0])) == (
        "0F0.0 0D2H_KV0.0 0F0.1 0D2H_KV0.1 1F0.0 1F0.1 "
        "0H2D_KV0.0 1B0.1 0H2D_KV0.1 1B0.0 1REDUCE 0B0.1 0B0.0 0REDUCE"
    )
    assert parse_program(format_program(schedule)).schedule == schedule


def test_without_a_backward_before_they_come_back_at_once():
    schedule, _ = program(v=1, n=2, leaving=(0,))
    assert " ".join(map(str, schedule.programs[0][4:])) == (
        "0H2D_KV0.0 0H2D_KV0.1 0B0.1 0B0.0 0REDUCE"
    )


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(("looped_bfs", "interleaved_seq1f1b", "sppo")),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.data(),
)
def test_copies_of_keys_fit_every_order(name, p, v, counts, data):
    v = 1 if name == "sppo" else v
    leaving = data.draw(st.sets(st.integers(0, p * v - 1)))
    saved_s = data.draw(st.sampled_from((0.0, 0.3)))
    step = costs(p * v, sum(counts), leaving=leaving, saved_s=saved_s, layers=2)
    lengths = [(16,) * n for n in counts]
    schedule = step_program(name, num_ranks=p, num_virtual=v, lengths=lengths, costs=step)
    assert not find_violations(schedule)
    copied = [a for q in schedule.programs for a in q if a.wire == "kv"]
    assert len(copied) == 2 * len(leaving) * sum(counts)
    assert {a.stage for a in copied} == leaving
    timeline = simulate(schedule, costs=step)
    for rank, track in enumerate(timeline.ranks):
        finish = dict(zip(track.actions, track.finish_s, strict=True))
        start = dict(zip(track.actions, track.start_s, strict=True))
        for action in (a for a in copied if a in finish and a.kind is ActionKind.H2D):
            last = len(lengths[action.sequence]) - 1
            first_reader = replace(action, kind=ActionKind.B, subsequence=last, wire=None)
            assert finish[action] <= start[first_reader] + 1e-9, (rank, action)


def test_on_one_rank_two_stages_have_their_keys_on_the_device_at_once():
    for v, n in ((4, 3), (6, 8)):
        schedule, step = program(v=v, n=n, leaving=range(v - 1))
        timeline = simulate(schedule, costs=step)
        assert peaks(timeline, "kv") == [2 * n]
        assert timeline.makespan_s == 3 * v * n  # copies of half a forward hide
        kept, step = program(v=v, n=n, leaving=())
        assert peaks(simulate(kept, costs=step), "kv") == [v * n]


def test_slow_copies_are_waited_for():
    schedule, step = program(v=3, n=4, leaving=(0, 1), copy_s=2.5)
    timeline = simulate(schedule, costs=step)
    assert timeline.makespan_s > 3 * 3 * 4
    assert timeline.ranks[0].idle_s("copy") == pytest.approx(timeline.makespan_s - 36)


def test_rules():
    whole = place_kv_copies(make("looped_bfs", p=1, v=2, n=2, m=1), stages=[0])
    (actions,) = whole.programs
    texts = [str(a) for a in actions]

    def broken(*order):
        return find_violations(replace(whole, programs=(tuple(actions[i] for i in order),)))

    every = list(range(len(actions)))
    out, back = texts.index("0D2H_KV0.1"), texts.index("0H2D_KV0.1")
    (found, *_) = broken(*[i for i in every if i != back])
    assert "0D2H_KV0.1 has no H2D" in str(found)
    (found, *_) = broken(*[i for i in every if i not in (out, back)])
    assert "K and V of 1 of 2 units" in str(found)
    late = [i for i in every if i != back]
    late.insert(texts.index("0B0.1"), back)
    (found, *_) = broken(*late)
    assert "0B0.1 stands before 0H2D_KV0.1" in str(found)


def test_units_that_are_cut_keep_their_keys():
    schedule = make("sppo_msp", p=2, n=4, m=1)
    with pytest.raises(ValueError, match="keep K and V"):
        place_kv_copies(schedule, stages=[0, 1])


def test_evaluation_keeps_its_keys():
    schedule = make("looped_bfs", p=1, v=2, n=2, m=1, forward_only=True)
    with pytest.raises(ValueError, match="has no backward"):
        place_kv_copies(schedule, stages=[0])
