"""K and V that are copied or recomputed between a stage's forward and its backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sppo.schedule.actions import ActionKind
from sppo.schedule.checks import find_violations
from sppo.schedule.costs import CopyEngines, LayerCopies, abstract_costs
from sppo.schedule.program import generate, lower
from sppo.schedule.program_text import format_program, parse_program
from sppo.schedule.simulation.simulate import simulate
from tests.schedule.cases import make, peaks
from tests.tiers import examples


def costs(stages, units, *, leaving, recomputed=(), copy_s=0.5, layers=1, saved_s=0.0):
    """Forwards of 1 s and backwards of 2 s beside copies of K and V that take ``copy_s`` each.

    Recomputing K and V takes a quarter of a second.
    """
    found = abstract_costs(stages, num_units=units)
    kv, again = np.zeros((2, stages, units))
    kv[list(leaving)] = copy_s
    again[list(recomputed)] = 0.25
    return replace(
        found,
        kv_bytes=np.ones((stages, units)),
        kv_offload_bytes=kv,
        kv_recompute_s=again,
        activation_bytes=np.full((stages, units), saved_s),
        offload_bytes=np.full((stages, units), saved_s),
        copies=CopyEngines(1.0, 1.0),
        layer_copies=(LayerCopies(layers, 2, 2),) * stages,
    )


def program(name="looped_bfs", *, p=1, v=3, n=4, m=1, leaving=(0, 1), **how):
    step = costs(p * v, m * n, leaving=leaving, **how)
    made = generate(name, num_ranks=p, num_virtual=v, lengths=((16,) * n,) * m, costs=step)
    return lower(made, costs=step), step


def test_keys_come_back_beside_the_backwards_of_the_stage_behind():
    schedule, _ = program(v=2, n=2, leaving=(0,))
    assert " ".join(map(str, schedule.programs[0])) == (
        "0F0.0 0D2H_KV0.0 0F0.1 0D2H_KV0.1 1F0.0 1F0.1 "
        "0H2D_KV0.0 1B0.1 0H2D_KV0.1 1B0.0 1REDUCE 0B0.1 0B0.0 0REDUCE"
    )
    assert parse_program(format_program(schedule)) == schedule


def test_without_a_backward_before_they_come_back_at_once():
    schedule, _ = program(v=1, n=2, leaving=(0,))
    assert " ".join(map(str, schedule.programs[0][4:])) == (
        "0H2D_KV0.0 0H2D_KV0.1 0B0.1 0B0.0 0REDUCE"
    )


@settings(max_examples=examples(35, all=100))
@given(
    st.sampled_from(("looped_bfs", "interleaved_seq1f1b", "sppo")),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.data(),
)
def test_copies_of_keys_fit_every_order(name, p, v, counts, data):
    v = 1 if name == "sppo" else v
    fates = data.draw(st.lists(st.sampled_from(["keep", "copy", "again"]), min_size=p * v))
    leaving, recomputed = (
        {s for s, f in enumerate(fates[: p * v]) if f == fate} for fate in ("copy", "again")
    )
    saved_s = data.draw(st.sampled_from((0.0, 0.3)))
    step = costs(
        p * v, sum(counts), leaving=leaving, recomputed=recomputed, saved_s=saved_s, layers=2
    )
    lengths = [(16,) * n for n in counts]
    made = generate(name, num_ranks=p, num_virtual=v, lengths=lengths, costs=step)
    schedule = lower(made, costs=step)
    assert not find_violations(schedule)
    copied = [a for q in schedule.programs for a in q if a.wire == "kv"]
    assert len(copied) == 2 * len(leaving) * sum(counts)
    assert {a.stage for a in copied} == leaving
    again = [a for q in schedule.programs for a in q if a.kind is ActionKind.KV]
    assert len(again) == len(recomputed) * sum(counts)
    assert {a.stage for a in again} == recomputed
    timeline = simulate(schedule, costs=step)
    for rank, track in enumerate(timeline.ranks):
        finish = dict(zip(track.actions, track.finish_s, strict=True))
        start = dict(zip(track.actions, track.start_s, strict=True))
        returned = [*(a for a in copied if a.kind is ActionKind.H2D), *again]
        for action in (a for a in returned if a in finish):
            last = len(lengths[action.sequence]) - 1
            first_reader = action._replace(kind=ActionKind.B, subsequence=last, wire=None)
            assert finish[action] <= start[first_reader] + 1e-9, (rank, action)


def test_on_one_rank_two_stages_have_their_keys_on_the_device_at_once():
    for v, n in ((4, 3), (6, 8)):
        schedule, step = program(v=v, n=n, leaving=range(v - 1))
        timeline = simulate(schedule, costs=step)
        assert peaks(timeline, "kv") == [2 * n]
        assert timeline.makespan_s == 3 * v * n  # copies of half a forward hide
        kept, step = program(v=v, n=n, leaving=())
        assert peaks(simulate(kept, costs=step), "kv") == [v * n]


def test_keys_that_are_recomputed_take_time_and_no_memory():
    schedule, step = program(v=3, n=4, leaving=(), recomputed=(0, 1))
    text = " ".join(map(str, schedule.programs[0]))
    assert "2B0.0 2REDUCE 1KV0.0 1KV0.1 1KV0.2 1KV0.3 1B0.3" in text
    timeline = simulate(schedule, costs=step)
    assert timeline.makespan_s == 3 * 3 * 4 + 2 * 4 * 0.25
    assert peaks(timeline, "kv") == [4]


def test_slow_copies_are_waited_for():
    schedule, step = program(v=3, n=4, leaving=(0, 1), copy_s=2.5)
    timeline = simulate(schedule, costs=step)
    assert timeline.makespan_s > 3 * 3 * 4
    assert timeline.ranks[0].idle_s("copy") == pytest.approx(timeline.makespan_s - 36)


def test_blocks_follow_a_backward_that_waits_for_keys():
    """Its last block comes back while it runs, not while it would have run without the wait."""
    schedule, step = program("sppo", v=1, n=1, leaving=(0,), copy_s=9.0, layers=6, saved_s=0.5)
    track = simulate(schedule, costs=step).ranks[0]
    ends_s = {str(a): end for a, end in zip(track.actions, track.finish_s, strict=True)}
    starts_s = {str(a): start for a, start in zip(track.actions, track.start_s, strict=True)}
    assert starts_s["0B0.0"] == ends_s["0H2D_KV0.0"]
    layer_s, block_s, ahead = 2 / 6, 0.5 / 6, 2
    last_s = starts_s["0B0.0"] + (5 - ahead) * layer_s + block_s
    assert ends_s["0H2D0.0"] == pytest.approx(last_s)


def test_units_that_are_cut_keep_their_keys():
    assert any(action.num_shards > 1 for action in make("sppo_msp", p=2, n=4, m=1).programs[0])
    with pytest.raises(ValueError, match=r"activations\.kv=retain"):
        program("sppo_msp", p=2, v=1, leaving=(0, 1))
